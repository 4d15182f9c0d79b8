"""What a subscription does when its owner misbehaves, and how much it holds; the rest is in the contract suite."""

import asyncio

import pytest

from streams._paged import PAGE_BYTES, PagedSubscription
from streams.errors import LogError, LogRefused
from streams.log import Partition, Record
from streams.testing import NotingOwner, collect

PARTITION = Partition("imports", 0, "imports")


async def nothing(partition: Partition, position: int) -> list[Record]:
    """An empty partition."""
    return []


async def test_waiting_reader_hears_of_it_when_the_owner_raises() -> None:
    """An owner may not raise; when it does all the same, nobody waits for ever for records that cannot come."""

    class Broken(NotingOwner):
        async def activate(self, partition: Partition) -> int:
            await asyncio.sleep(0)
            raise RuntimeError("a mistake in the engine")

    subscription = PagedSubscription(PARTITION, Broken(), asyncio.Lock(), nothing)

    with pytest.raises(RuntimeError, match="a mistake in the engine"):
        await asyncio.wait_for(subscription.ready(), 5)
    await subscription.close()


async def test_waiting_reader_hears_of_it_when_the_log_refuses() -> None:
    """A file that is damaged needs a person, so the processor must stop."""

    async def damaged(partition: Partition, position: int) -> list[Record]:
        raise LogRefused("database disk image is malformed")

    subscription = PagedSubscription(PARTITION, NotingOwner(), asyncio.Lock(), damaged)

    with pytest.raises(LogRefused, match="malformed"):
        await asyncio.wait_for(subscription.ready(), 5)
    await subscription.close()


async def test_waiting_reader_hears_of_it_when_the_subscription_is_closed() -> None:
    """Whoever waits in one task while another closes is not left behind."""
    subscription = PagedSubscription(PARTITION, NotingOwner(), asyncio.Lock(), nothing)
    waiting = asyncio.create_task(subscription.ready())
    await asyncio.sleep(0)

    await subscription.close()

    with pytest.raises(LogError, match="closed"):
        await asyncio.wait_for(waiting, 5)


async def test_next_page_waits_when_the_records_held_are_large() -> None:
    """A bound on records alone would let a thousand megabytes in."""

    async def large(partition: Partition, position: int) -> list[Record]:
        return [Record(position, 1, b"x" * 1_000_000)]

    subscription = PagedSubscription(PARTITION, NotingOwner(), asyncio.Lock(), large)
    await collect(subscription, 3)  # each wakes the reading
    for _ in range(100):
        await asyncio.sleep(0)

    held = subscription.take(1_000)

    assert sum(len(record.data) for record in held) < PAGE_BYTES + 1_000_000
    await subscription.close()


async def test_turn_passes_on_when_the_owner_ignores_that_it_is_cancelled() -> None:
    """Closing waits a bounded time for the owner; it does not ask it again, whatever it answers."""

    class Stubborn(NotingOwner):
        async def activate(self, partition: Partition) -> int:
            self.activations += 1
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0)
            return 0

    turn = asyncio.Lock()
    owner, successor = Stubborn(), NotingOwner()
    subscription = PagedSubscription(PARTITION, owner, turn, nothing)
    next_one = PagedSubscription(PARTITION, successor, turn, nothing)
    await asyncio.sleep(0)

    await asyncio.wait_for(subscription.close(), 5)
    for _ in range(5):
        await asyncio.sleep(0)

    assert (owner.activations, successor.activations) == (1, 1)
    await next_one.close()
