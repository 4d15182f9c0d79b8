"""From the publisher's queue to the mail server: the publisher's own languages, a flood, a kill at the worst moment."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from models.slices import batch_id
from processors import _queues
from processors._demo.sink import Sink
from streams.testing import eventually
from tests.conftest import Services
from tests.support.amqp import Stage, amqp_url, new_stage
from tests.support.job import PROCESSORS, Job, address, people
from tests.support.pod import Pod
from tests.support.sites import Site

SUPPORT = Path(__file__).parents[1] / "support"
ALL = ("intake", *PROCESSORS)


@pytest.fixture
async def stage(services: Services) -> AsyncIterator[Stage]:
    """A queue of one's own; its intake is not started, the job has one."""
    async with new_stage(services) as stage:
        yield stage


def amqp(stage: Stage) -> dict[str, Any]:
    """The settings that lead to the stage's queue."""
    names = ("AMQP_URL", "AMQP_EXCHANGE", "AMQP_ROUTING_KEY", "AMQP_QUEUE", "AMQP_RETRY_WAITS_SECONDS")
    environment = stage.environment()
    return {name: environment[name] for name in names}


def acked(job: Job, lists: int) -> None:
    """An AssertionError until intake has acked so many."""
    job.check()
    assert job.metric("afluente_records_total", processor="intake", outcome="done") == lists


# ---- the publisher's own clients


async def test_everybody_is_mailed_once_when_the_publisher_is_written_in_php(
    stage: Stage, services_site: Site, sink: Sink, services: Services
) -> None:
    """php-amqplib declares its queue before us and after us, and publishes both times; its JSON is PHP's."""
    services.do("php")
    queues = stage.queues
    await stage.management.call("DELETE", "queues", "/", queues.queue)
    await stage.management.call("DELETE", "exchanges", "/", queues.exchange)

    def publish(lists: int, registrations: int) -> None:
        login = (services.host, str(services.amqp_port), services.user, services.password)
        names = (queues.exchange, queues.routing_key, queues.queue)
        command = ["php", str(SUPPORT / "publisher.php"), *login, *names, str(lists), str(registrations)]
        subprocess.run(command, check=True, timeout=30)

    await asyncio.to_thread(publish, 1, 5)
    async with Job(services_site, sink, processors=ALL, **amqp(stage)) as job:
        await job.settled(5)
        await asyncio.to_thread(publish, 3, 5)
        await job.settled(15)
        assert job.mails() == {f"p{n}.{m}@example.com": 1 for n in (1, 2, 3) for m in range(1, 6)}
        assert "João Exemplo" in json.dumps([row["content"] for row in await job.rows()], ensure_ascii=False)


async def test_everybody_is_mailed_once_when_a_plain_script_publishes_the_same_list_twice(
    stage: Stage, services_site: Site, sink: Sink
) -> None:
    """The same list twice is one batch: it was received twice, and mailed once."""
    body = json.dumps(people(20)).encode()
    queues = stage.queues

    def publish() -> None:
        url = amqp_url(stage.services)
        command = [
            sys.executable,
            str(SUPPORT / "publisher.py"),
            url,
            queues.exchange,
            queues.routing_key,
            queues.queue,
        ]
        subprocess.run(command, input=body + b"\n" + body + b"\n", check=True, timeout=30)

    async with Job(services_site, sink, processors=ALL, **amqp(stage)) as job:
        await asyncio.to_thread(publish)
        await job.settled(20)
        await eventually(lambda: job.received(batch_id(body), times=2))
        assert job.mails() == {address(n): 1 for n in range(1, 21)}


# ---- as a pod


async def test_pod_of_intake_works_and_stops_in_good_order_when_there_is_no_database(
    stage: Stage, tmp_path: Path
) -> None:
    """Its probe says ready, a list arrives, SIGTERM ends it with 0; no line of its log names anybody."""
    async with Pod(tmp_path, stage.environment(), "intake") as pod:
        await stage.publish(people(3))
        await pod.logged("intake.published")
        stage.amqp.refusing = True
        stage.amqp.cut()

        async def is_not_ready() -> None:
            code, text = await pod.probe("/readyz")
            assert (code, "the AMQP broker" in text) == (503, True)

        await eventually(is_not_ready)
        await pod.terminate()
        assert await pod.ended() == 0
    assert len(await stage.items()) == 3


# ---- floods and faults


async def test_batch_of_ten_thousand_is_acked_when_the_mail_server_is_down(
    stage: Stage, services_site: Site, sink: Sink
) -> None:
    """Acked because it is in the stream; that none of it can be mailed now concerns the queue no more."""
    sink.script("connect", do="close")
    async with Job(services_site, sink, processors=ALL, **amqp(stage)) as job:
        await stage.publish(people(10_000))
        await eventually(lambda: acked(job, 1), 30)

        async def is_split() -> None:
            assert await job.sql("SELECT total, valid FROM import_batches") == [{"total": 10_000, "valid": 10_000}]

        await eventually(is_split, 60)
        assert sink.mails == []
    assert await stage.ready() == 0


async def test_nobody_is_mailed_twice_when_intake_is_killed_between_putting_back_and_ack(
    stage: Stage, services_site: Site, sink: Sink
) -> None:
    """Two of the list are in the queue then, one with a count. Both are published; the keys make them one."""
    body = json.dumps(people(10)).encode()
    await stage.publish(body)
    environment = services_site.environment(sink, **amqp(stage))
    child = await asyncio.create_subprocess_exec(
        sys.executable, SUPPORT / "intake_killed.py", env=environment, stderr=asyncio.subprocess.DEVNULL
    )
    assert await asyncio.wait_for(child.wait(), 30) == -9

    async def both_are_back() -> None:
        assert await stage.ready() == 2

    await eventually(both_are_back)
    found = await stage.messages(stage.queues.queue)
    assert sorted(m.headers.get(_queues.RETRY_COUNT, 0) for m in found) == [0, 1]
    async with Job(services_site, sink, processors=ALL, **amqp(stage)) as job:
        await eventually(lambda: job.received(batch_id(body), times=2))
        await job.settled(10)
        assert job.mails() == {address(n): 1 for n in range(1, 11)}
