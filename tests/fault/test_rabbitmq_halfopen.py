"""A connection whose other side has vanished without a word: no error ever comes from it, only silence."""

import asyncio

import pytest

from streams.errors import LogError
from streams.testing import NotingOwner, collect, eventually
from tests.support.rabbit import Rabbit


async def test_consumer_moves_on_when_its_connection_is_half_open(rabbit: Rabbit) -> None:
    """The watchdog replaces the silent connection; the next record comes."""
    partition = await rabbit.new_partition()
    owner = NotingOwner()
    subscription = await (await rabbit.new_log(heartbeat=1)).subscribe(partition, "readers", owner)

    def is_asked(times: int) -> None:
        assert owner.activations == times

    await eventually(lambda: is_asked(1))
    rabbit.proxy.freeze()
    await rabbit.publish(partition, [b"one"])

    assert [record.data for record in await collect(subscription, 1, timeout=30)] == [b"one"]
    assert owner.activations == 2


async def test_consumer_moves_on_when_only_what_it_receives_is_lost(rabbit: Rabbit) -> None:
    """That our own heartbeats still reach the broker proves nothing."""
    partition = await rabbit.new_partition()
    owner = NotingOwner()
    subscription = await (await rabbit.new_log(heartbeat=1)).subscribe(partition, "readers", owner)

    def is_asked() -> None:
        assert owner.activations == 1

    await eventually(is_asked)
    rabbit.proxy.freeze(up=False)
    await rabbit.publish(partition, [b"one"])

    assert [record.data for record in await collect(subscription, 1, timeout=30)] == [b"one"]


async def test_questions_are_answered_when_the_connection_for_them_was_half_open(rabbit: Rabbit) -> None:
    """An idle connection is watched like any other: a question on it fails soon, and the next has a new one."""
    partition = await rabbit.new_partition()
    log = await rabbit.new_log(heartbeat=1)
    rabbit.proxy.freeze()

    with pytest.raises(LogError, match="silent"):
        await log.bounds(partition)

    assert (await log.bounds(partition)).next == 0


async def test_close_is_bounded_when_the_broker_is_silent(rabbit: Rabbit) -> None:
    """A pod that must go does not wait for a goodbye that never comes."""
    partition = await rabbit.new_partition()
    log = await rabbit.new_log(heartbeat=60)
    await log.subscribe(partition, "readers", NotingOwner())
    await log.publisher(partition, "writer")
    rabbit.proxy.freeze()

    await asyncio.wait_for(log.close(), 20)

    def are_closed() -> None:
        assert rabbit.proxy.connections == 0

    rabbit.proxy.thaw()
    await eventually(are_closed)


async def test_close_is_bounded_when_the_broker_is_away(rabbit: Rabbit) -> None:
    """Nor does it wait for a connection that it is trying to get."""
    partition = await rabbit.new_partition()
    log = await rabbit.new_log()
    await log.subscribe(partition, "readers", NotingOwner())
    rabbit.proxy.refusing = True
    rabbit.proxy.cut()

    def is_known() -> None:
        assert not log.connected

    await eventually(is_known)

    await asyncio.wait_for(log.close(), 20)
