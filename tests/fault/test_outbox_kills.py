"""Relays and syncs that are killed or come twice: every committed event is sent, and a repeat is listed.

Times are short: a claim lasts 5 s, a reservation 2 s.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from processors._house import outbox_limits
from processors.sync import processor as sync
from streams.relay import Relay, Tail
from streams.testing import eventually
from tests.support.engine import metrics
from tests.support.outbox import Outbox
from tests.support.pod import Pod
from tests.support.receiver import Receiver, Reply
from tests.support.sites import Site

QUICK = {"QUEUED_VISIBILITY_SECONDS": "1"}


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    """The new checkout."""
    async with Receiver() as receiver:
        yield receiver


class Death(BaseException):
    """A process that ends here, as far as that is possible inside of the test's."""


def dying_relay(outbox: Outbox, step: str) -> Relay:
    """A relay of the events that dies when it first reaches a step."""
    assert outbox.house is not None

    def reached(name: str) -> None:
        if name == step:
            raise Death

    s = outbox.settings
    tail = Tail(sync.TABLE, s.outbox_stream, sync.NAME, sync.event_message)
    return Relay(tail, outbox.house.log, outbox.house.engine, outbox_limits(s), metrics(), reached)


@pytest.mark.parametrize("step", ["reserved", "published"])
async def test_nothing_is_lost_or_sent_twice_when_a_relay_dies_between_its_steps(
    site: Site, receiver: Receiver, step: str
) -> None:
    """Reserved and never published: the reservation passes. Published and not known: the copy dies on the claim."""
    async with Outbox(site, receiver, processors=("sync",), **QUICK) as outbox:
        await outbox.insert_many(20)
        with pytest.raises(BaseExceptionGroup):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(dying_relay(outbox, step).run(asyncio.Event()))
        reserved = await outbox.events("queued_until IS NOT NULL OR claim_no > 0")
        assert reserved == 20
        await outbox.stop()
    async with Outbox(outbox.site, receiver, **QUICK) as outbox:
        await outbox.all_are("sent", 20)
    assert receiver.counts() == Counter(dict.fromkeys(range(1, 21), 1))


@pytest.mark.timeout(180)
async def test_every_event_is_sent_once_when_relays_are_killed_one_after_the_other(
    services_site: Site, receiver: Receiver
) -> None:
    """SIGKILL in the middle of a stream of commits, with a second relay alive in the last rounds."""
    async with Outbox(services_site, receiver, processors=("sync",), **QUICK) as outbox:
        for round_ in range(3):
            async with AsyncExitStack() as pods:
                relay = await pods.enter_async_context(Pod(outbox.site.folder, outbox.environment, "outbox_relay"))
                if round_ == 2:
                    await pods.enter_async_context(Pod(outbox.site.folder, outbox.environment, "outbox_relay"))
                for n in range(40):
                    await outbox.insert()
                    if n == 20:
                        await relay.kill()
        async with Pod(outbox.site.folder, outbox.environment, "outbox_relay"):
            await outbox.all_are("sent", 120)
        assert await outbox.events("doubts > 0 OR attempts > 1") == 0
    assert set(receiver.counts().values()) == {1}


@pytest.mark.timeout(180)
async def test_a_killed_sync_repeats_at_most_its_slots_and_says_which(services_site: Site, receiver: Receiver) -> None:
    """SIGKILL between requests and answers: the same ids again, each with a doubt."""
    slots, count = 4, 60
    receiver.script = lambda request: Reply(delay=0.1)
    changes = {"OUTBOX_SLOTS": slots, "OUTBOX_SLOTS_PER_TARGET": slots, "OUTBOX_MAX_ATTEMPTS": 5}
    async with Outbox(services_site, receiver, processors=("outbox_relay",), **changes, **QUICK) as outbox:
        await outbox.insert_many(count)
        for kills in (1, 2):
            async with Pod(outbox.site.folder, outbox.environment, "sync") as pod:

                def some_are_under_way(least: int = kills * 10) -> None:
                    assert receiver.running
                    assert len(receiver.requests) >= least

                await eventually(some_are_under_way)
                await pod.kill()
        async with Pod(outbox.site.folder, outbox.environment, "sync"):
            await outbox.all_are("sent", count)
        doubted = {row["id"] for row in await outbox.sql("SELECT id FROM outbox_events WHERE doubts > 0")}
    repeated = {event for event, times in receiver.counts().items() if times > 1}
    assert len(receiver.counts()) == count
    assert repeated <= doubted
    assert 1 <= len(doubted) <= 2 * slots


async def test_a_backlog_longer_than_the_visibility_makes_no_endless_copies(site: Site, receiver: Receiver) -> None:
    """While nobody reads, the stream grows to one message each and no further than the limit of repeats."""
    count, limit = 300, 50
    changes = {"QUEUED_VISIBILITY_SECONDS": "0.2", "REPEAT_LAG_LIMIT": limit, "RELAY_BATCH": 100}
    async with Outbox(site, receiver, processors=("outbox_relay",), **changes) as outbox:
        await outbox.insert_many(count)

        async def length() -> int:
            partitions = await outbox.log.partitions(outbox.settings.outbox_stream)
            return sum([(await outbox.log.bounds(partition)).next for partition in partitions])

        async def all_are_published() -> None:
            assert await length() >= count

        await eventually(all_are_published)
        await asyncio.sleep(1.5)  # time for many visibilities to pass
        assert await length() == count
        await outbox.stop()
    async with Outbox(outbox.site, receiver) as outbox:
        await outbox.all_are("sent", count)
    assert len(receiver.counts()) == count
    assert set(receiver.counts().values()) == {1}
