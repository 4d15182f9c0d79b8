"""The broker restarts, the network cuts, freezes or goes deaf in the middle of the job: nothing lost, nothing twice.

On RabbitMQ, behind a proxy; the embedded log has no connection. What retention drops unread is shown on both.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from models.registration import parse_registration
from processors._demo.sink import Sink
from processors._serve import unready
from streams.log import route
from streams.testing import eventually
from tests.conftest import Services
from tests.support.job import Job, address, people, person
from tests.support.sites import Site
from tests.support.tcpproxy import TcpProxy

FAULTS = ["cut", "frozen", "deaf", "restart"]
RESTART = pytest.mark.timeout(180)


@pytest.fixture
async def proxy(services: Services) -> AsyncIterator[TcpProxy]:
    """Before the broker, for the processors only: the test looks past it."""
    async with TcpProxy(services.stream_port) as proxy:
        yield proxy


def job_behind(proxy: TcpProxy, fault: str, site: Site, sink: Sink, **changes: Any) -> Job:
    """A job that notices a silent broker within two seconds; but not before the broker has restarted."""
    url = site.log_url.replace(f":{site.log_url.rsplit(':', 1)[1].strip('/')}/", f":{proxy.port}/")
    return Job(site, sink, LOG_URL=url, LOG_HEARTBEAT_SECONDS=30 if fault == "restart" else 1, **changes)


async def do(fault: str, proxy: TcpProxy, services: Services) -> None:
    """`cut`: reset. `frozen`: nothing passes any more. `deaf`: what we write arrives, no answer does. `restart`: no
    answer arrives until the broker has restarted, so that it meets confirms that are open now."""
    match fault:
        case "cut":
            proxy.cut()
        case "frozen":
            proxy.freeze()
        case "deaf":
            proxy.freeze(up=False)
        case "restart":
            proxy.freeze(up=False)
            await asyncio.to_thread(services.do, "restart-broker")
            proxy.cut()
    proxy.quota.lift()


@RESTART
@pytest.mark.parametrize("fault", FAULTS)
async def test_each_recipient_is_published_once_when_the_broker_is_lost_in_mid_split(
    services_site: Site, sink: Sink, proxy: TcpProxy, services: Services, fault: str
) -> None:
    """10,000 registrations, confirms open: all of them arrive in `recipients`, none twice, counted once (O-20)."""
    async with job_behind(proxy, fault, services_site, sink, processors=["splitter"], TURN_RECORDS=1) as job:

        async def has_begun() -> None:
            assert await job.stored() > 0

        proxy.quota.set(500_000)
        batch = await job.publish(people(10_000))
        await eventually(has_begun)
        assert await job.stored() < 10_000
        await do(fault, proxy, services)

        async def is_split() -> None:
            job.check()
            rows = await job.sql("SELECT total, received, valid, duplicates, times_received FROM import_batches")
            assert [tuple(row.values()) for row in rows] == [(10_000, 10_000, 10_000, 0, 1)]

        await eventually(is_split, 60)
        messages = await job.recipients()
        assert len(messages) == len({message.id for message in messages}) == 10_000
        assert (await job.batch(batch)).waiting == 10_000


@RESTART
@pytest.mark.parametrize("fault", ["cut", "frozen", "restart"])
async def test_each_is_mailed_once_when_the_broker_is_lost_in_mid_mail(
    services_site: Site, sink: Sink, proxy: TcpProxy, services: Services, fault: str
) -> None:
    """The mailer finishes what it holds, comes back by itself, and goes on behind it; later batches as well (O-21)."""
    sink.script("dot", delay=0.05)
    sink.script("rcpt", reply="451 4.7.1 later", recipient=address(7), times=1)
    async with job_behind(proxy, fault, services_site, sink, SLOTS=4) as job:
        await job.publish(people(150))
        await sink.wait_for(30)
        await do(fault, proxy, services)
        await job.settled(150, 60)
        await job.publish([person(151)])
        await job.settled(151, 60)
        assert job.mails() == {address(n): 1 for n in range(1, 152)}
        assert await job.attempts() == {address(n): 1 + (n == 7) for n in range(1, 152)}
        first = [message.id for message in await job.recipients() if message.type == "recipient"]
        assert len(first) == len(set(first)) == 151


@RESTART
@pytest.mark.parametrize("fault", ["deaf", "restart"])
async def test_next_batch_is_mailed_when_all_connections_died_while_idle(
    services_site: Site, sink: Sink, proxy: TcpProxy, services: Services, fault: str
) -> None:
    """Nobody tells an idle reader that its connection is dead; `connected` is not `consuming` (O-21)."""
    async with job_behind(proxy, fault, services_site, sink) as job:
        await job.publish(people(3))
        await job.settled(3)
        await do(fault, proxy, services)
        await job.publish([person(4)])
        await job.settled(4)
        assert job.mails() == {address(n): 1 for n in (1, 2, 3, 4)}


async def test_partition_is_halted_and_the_others_go_on_when_retention_overtook_its_reader(
    site: Site, sink: Sink
) -> None:
    """Never a silent jump: said with the size of the gap in status and probe; the batch shows who waits (O-22)."""
    small: dict[str, Any] = {"STREAM_SEGMENT_BYTES": 200_000, "STREAM_MAX_BYTES": 600_000}
    others = [person(n) for n in range(1, 40) if partition_of(n) != 0]
    stuck = [person(n) for n in range(1, 40) if partition_of(n) == 0]
    job = Job(site, sink, **small)
    async with job:
        first = await job.publish(stuck[:1])
        await job.settled(1)
        await job.stop()
        await overtake(job)
        await job.start()
        batch = await job.publish([*others, *stuck[1:]])

        async def is_halted() -> str:
            [saved] = [s for s in (await job.status()).processors if s.processor == "mailer" and s.partition == 0]
            assert saved.halted_reason
            return saved.halted_reason

        assert "retention overtook the reader" in await eventually(is_halted)
        assert job.house is not None
        assert await unready(job.house, ["mailer"]) == [f"mailer is halted at {job.settings.recipients_stream} 0"]

        async def are_sent() -> None:
            job.check()
            seen = await job.batch(batch)
            assert (seen.sent, seen.waiting) == (len(others), len(stuck) - 1)

        await eventually(are_sent)
        assert job.mails().total() == 1 + len(others)
        assert (await job.batch(first)).sent == 1
        assert await job.dead_letters() == []


def partition_of(number: int) -> int:
    """Where the message of `person(number)` goes."""
    return route(parse_registration(person(number)).key, 3)


async def overtake(job: Job) -> None:
    """Write to partition 0 until what the mailer has not read is dropped."""
    [partition, *_] = await job.log.partitions(job.settings.recipients_stream)
    read_to = (await job.log.bounds(partition)).next
    for _ in range(20):
        await job.put(*[b"." * 1_000] * 100, stream=job.settings.recipients_stream)

    async def is_truncated() -> None:
        assert (await job.log.bounds(partition)).first > read_to

    await eventually(is_truncated)
