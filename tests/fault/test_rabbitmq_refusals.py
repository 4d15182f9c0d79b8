"""What only a person can put right is said at once and by name; what may pass is a LogError. Never the password."""

import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
import trustme

from streams.errors import LogError, LogRefused, StreamMissing
from streams.log import Log, Partition
from streams.rabbitmq import RabbitLog
from streams.testing import NotingOwner, collect
from tests.conftest import Services
from tests.support.broker import new_name
from tests.support.rabbit import Rabbit

SECRET = "s3cr%2Ft-of-nobody"


@asynccontextmanager
async def opened(log: RabbitLog) -> AsyncIterator[RabbitLog]:
    """The log, open for the time of the block."""
    try:
        await log.open()
        yield log
    finally:
        await log.close()


@asynccontextmanager
async def user(rabbit: Rabbit, **permissions: str) -> AsyncIterator[str]:
    """LOG_URL of a new user with these permissions and no others."""
    name = f"user-{uuid4().hex[:8]}"
    await rabbit.management.put_user(name, "secret", **permissions)
    try:
        yield f"rabbitmq-stream://{name}:secret@{rabbit.services.host}:{rabbit.services.stream_port}/"
    finally:
        await rabbit.management.call("DELETE", "users", name)


async def test_login_is_refused_when_the_password_is_wrong(broker: Services) -> None:
    """The text names broker and user, not the password."""
    log = RabbitLog(f"rabbitmq-stream://{broker.user}:{SECRET}@{broker.host}:{broker.stream_port}/")

    with pytest.raises(LogRefused, match="AuthenticationFailure") as caught:
        await log.open()

    assert broker.user in str(caught.value)
    assert "s3cr" not in f"{caught.value!r} {log!r} {vars(log)}"


async def test_login_is_refused_when_the_vhost_is_missing(broker: Services) -> None:
    """A mistake in LOG_URL, not an outage."""
    log = RabbitLog(f"{broker.log_url}nowhere")

    with pytest.raises(LogRefused, match="VirtualHostAccessFailure") as caught:
        await log.open()

    assert "nowhere" in str(caught.value)


@pytest.mark.parametrize("right", ["configure", "write", "read"])
async def test_use_is_refused_when_a_permission_is_missing(rabbit: Rabbit, right: str) -> None:
    """Each of the three rights is asked for where it is used."""
    partition = await rabbit.new_partition()
    permissions = {"configure": ".*", "write": ".*", "read": ".*"} | {right: ""}
    uses: dict[str, Callable[[Log], object]] = {
        "configure": lambda log: log.declare(replace(rabbit.spec(partition), name=new_name())),
        "write": lambda log: log.publisher(partition, "writer"),
        "read": lambda log: log.subscribe(partition, "readers", NotingOwner()),
    }
    async with user(rabbit, **permissions) as url, opened(RabbitLog(url)) as log:
        with pytest.raises(LogRefused, match="AccessRefused"):
            await uses[right](log)  # type: ignore[misc]


async def test_subscription_is_refused_when_the_stream_is_missing(rabbit: Rabbit) -> None:
    """Nothing is created by reading."""
    name = new_name()

    with pytest.raises(StreamMissing, match=name):
        await rabbit.spared.subscribe(Partition(name, 0, name), "readers", NotingOwner())


async def test_declaring_is_refused_when_the_retention_differs(rabbit: Rabbit) -> None:
    """The broker would keep the old retention without a word of what it is; the text says what was asked for."""
    partition = await rabbit.new_partition(max_bytes=600_000, segment_bytes=200_000)

    with pytest.raises(LogRefused, match=r"max-length-bytes.*700000"):
        await rabbit.spared.declare(replace(rabbit.spec(partition), max_bytes=700_000))


async def test_try_again_is_said_when_nobody_listens() -> None:
    """A broker that is away comes back."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    with pytest.raises(LogError, match="ConnectionRefusedError"):
        await RabbitLog(f"rabbitmq-stream://a:b@127.0.0.1:{port}/").open()


async def test_second_publisher_of_a_name_is_a_mistake_while_the_first_lives(rabbit: Rabbit) -> None:
    """Two of them would drop each other's messages, confirmed."""
    partition = await rabbit.new_partition()
    first = await rabbit.spared.publisher(partition, "writer")

    with pytest.raises(ValueError, match="writer"):
        await rabbit.spared.publisher(partition, "writer")

    await first.close()
    await rabbit.spared.publisher(partition, "writer")


async def test_records_are_read_when_the_broker_is_reached_by_tls(rabbit: Rabbit) -> None:
    """With the authority that signed the broker's certificate."""
    partition = await rabbit.new_partition()
    async with opened(RabbitLog(rabbit.services.log_url_tls, ca_file=rabbit.services.ca_file)) as log:
        publisher = await log.publisher(partition, "writer")
        await publisher.publish([b"." * 100_000, b"two"], [1, 2])
        subscription = await log.subscribe(partition, "readers", NotingOwner())

        assert [len(record.data) for record in await collect(subscription, 2)] == [100_000, 3]


async def test_connection_is_refused_when_the_certificate_is_not_trusted(broker: Services, tmp_path: Path) -> None:
    """Neither with another authority nor with those of the system is anything sent, least of all the password."""
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    for ca_file in (tmp_path / "other.pem", None):
        with pytest.raises(LogRefused, match="CERTIFICATE_VERIFY_FAILED"):
            await RabbitLog(broker.log_url_tls, ca_file=ca_file).open()


async def test_password_stays_out_of_the_logs_when_everything_is_logged(
    broker: Services, caplog: pytest.LogCaptureFixture
) -> None:
    """rstream would write the frame of the login, and those of the bodies, at level DEBUG."""
    caplog.set_level(logging.DEBUG)

    async with opened(RabbitLog(broker.log_url)):
        pass

    assert not [record for record in caplog.records if record.name.startswith("rstream")]
