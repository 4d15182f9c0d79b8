"""What is delivered, and when, after the owner of a subscription has named a position."""

import asyncio

import pytest

from streams.log import Log, Partition
from streams.testing import NotingOwner, collect, eventually
from tests.contract.moves import LIMIT, check_equal, data, numbered, publish, read


async def test_delivery_waits_when_activation_takes_long(log: Log, partition: Partition) -> None:
    """A slow database delays what is read and loses none of it."""
    await publish(log, partition, numbered(5))
    owner = NotingOwner()
    owner.may_answer.clear()
    subscription = await log.subscribe(partition, "readers", owner)
    await eventually(lambda: check_equal(owner.activations, 1))
    await publish(log, partition, numbered(5, first=5))
    assert subscription.take(10) == []

    owner.may_answer.set()

    assert data(await collect(subscription, 10)) == numbered(10)


async def test_subscribe_returns_before_the_owner_has_answered(log: Log, partition: Partition) -> None:
    """The owner may need the subscription in order to answer."""
    owner = NotingOwner()
    owner.may_answer.clear()

    subscription = await asyncio.wait_for(log.subscribe(partition, "readers", owner), LIMIT)

    assert subscription.partition == partition


@pytest.mark.parametrize("new", [2, 7], ids=["back", "forward"])
async def test_restart_delivers_from_the_new_position(log: Log, partition: Partition, new: int) -> None:
    """A replay sets the position; nothing of what was buffered before comes any more."""
    await publish(log, partition, numbered(10))
    offsets = [record.offset for record in await read(log, partition, 10)]
    owner = NotingOwner()
    subscription = await log.subscribe(partition, "players", owner)
    await collect(subscription, 3)

    owner.position = offsets[new]
    await asyncio.wait_for(subscription.restart(), LIMIT)

    records = await collect(subscription, 10 - new)
    assert [record.offset for record in records] == offsets[new:]
    assert owner.activations == 2


async def test_nothing_is_taken_after_a_restart_until_the_owner_has_answered(log: Log, partition: Partition) -> None:
    """What the old position had brought is gone with it."""
    await publish(log, partition, numbered(10))
    owner = NotingOwner()
    subscription = await log.subscribe(partition, "readers", owner)
    await collect(subscription, 3)
    owner.may_answer.clear()

    await asyncio.wait_for(subscription.restart(), LIMIT)
    assert subscription.take(10) == []
    await eventually(lambda: check_equal(owner.activations, 2))
    assert subscription.take(10) == []

    owner.may_answer.set()
    assert data(await collect(subscription, 10)) == numbered(10)


async def test_owner_is_asked_again_when_restarted_while_it_answers(log: Log, partition: Partition) -> None:
    """An answer to an older question is not used."""
    await publish(log, partition, numbered(10))
    offsets = [record.offset for record in await read(log, partition, 10)]
    owner = NotingOwner(offsets[0])
    owner.may_answer.clear()
    subscription = await log.subscribe(partition, "players", owner)
    await eventually(lambda: check_equal(owner.activations, 1))

    restarting = asyncio.create_task(subscription.restart())
    await asyncio.sleep(0)
    owner.position = offsets[6]
    owner.may_answer.set()
    await asyncio.wait_for(restarting, LIMIT)

    records = await collect(subscription, 4)
    assert [record.offset for record in records] == offsets[6:]


async def test_close_ends_when_the_owner_never_answers(log: Log, partition: Partition) -> None:
    """A pod that must go does not wait for a database that is away."""
    owner = NotingOwner()
    owner.may_answer.clear()
    subscription = await log.subscribe(partition, "readers", owner)
    await eventually(lambda: check_equal(owner.activations, 1))

    await asyncio.wait_for(subscription.close(), LIMIT)
    await asyncio.wait_for(log.close(), LIMIT)


async def test_closing_twice_is_harmless(log: Log, partition: Partition) -> None:
    """Whoever cleans up need not know who has cleaned up before."""
    subscription = await log.subscribe(partition, "readers", NotingOwner())
    publisher = await log.publisher(partition)

    for _ in range(2):
        await asyncio.wait_for(subscription.close(), LIMIT)
        await asyncio.wait_for(publisher.close(), LIMIT)
        await asyncio.wait_for(log.close(), LIMIT)


async def test_log_is_connected_while_it_is_in_use(log: Log, partition: Partition) -> None:
    """Readiness of a pod asks this."""
    await publish(log, partition, [b"one"])
    subscription = await log.subscribe(partition, "readers", NotingOwner())
    await collect(subscription, 1)

    assert log.connected
