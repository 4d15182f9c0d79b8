"""The helpers that other tests lean on. That the log in memory is a log is shown by the contract suite."""

import asyncio

import pytest

from streams.errors import StreamMissing, Unconfirmed
from streams.log import Bounds, Partition, StreamSpec
from streams.testing import MemoryLog, MovableClock, NotingOwner, collect, eventually


def test_both_clocks_go_on_when_time_passes() -> None:
    """Time that passes is seen by whoever looks at either."""
    clock = MovableClock()
    monotonic, wall, today = clock.monotonic(), clock.time(), clock.now()

    clock.advance(90)

    assert clock.monotonic() - monotonic == 90
    assert clock.time() - wall == 90
    assert (clock.now() - today).total_seconds() == 90


def test_only_the_wall_clock_moves_when_it_is_set() -> None:
    """A clock that is set back makes nothing younger and no lease longer."""
    clock = MovableClock()
    monotonic, wall = clock.monotonic(), clock.time()

    clock.step(-3600)

    assert clock.monotonic() == monotonic
    assert clock.time() == wall - 3600


async def test_answer_is_given_when_the_assertion_holds_at_last() -> None:
    """Plain functions and coroutines are both asked again."""
    asked = 0

    def third_time() -> int:
        nonlocal asked
        asked += 1
        assert asked >= 3
        return asked

    async def later() -> str:
        assert third_time() >= 5
        return "done"

    assert await eventually(third_time) == 3
    assert await eventually(later) == "done"


async def test_last_failure_is_raised_when_the_assertion_never_holds() -> None:
    """Whoever reads the failed test sees what was wrong, not that time passed."""

    def never() -> None:
        raise AssertionError("still missing")

    with pytest.raises(AssertionError, match="still missing"):
        await eventually(never, timeout=0.03)


async def test_other_errors_are_raised_at_once() -> None:
    """A mistake in the test is no reason to wait."""

    def mistaken() -> None:
        raise KeyError("typo")

    with pytest.raises(KeyError):
        await eventually(mistaken, timeout=60)


async def memory_partition() -> tuple[MemoryLog, Partition]:
    """A log in memory with one stream."""
    log = MemoryLog()
    await log.declare(StreamSpec("imports"))
    return log, (await log.partitions("imports"))[0]


async def test_collect_says_how_many_came_when_too_few_do() -> None:
    """A time-out alone would not tell whether anything came at all."""
    log, partition = await memory_partition()
    await (await log.publisher(partition)).publish([b"one"])
    subscription = await log.subscribe(partition, "readers", NotingOwner())

    with pytest.raises(TimeoutError, match="1 of 2"):
        await collect(subscription, 2, timeout=0.03)
    await log.close()


async def test_first_bound_moves_when_the_log_is_truncated() -> None:
    """So a test can show what a processor does whose position is gone."""
    log, partition = await memory_partition()
    publisher = await log.publisher(partition)
    await publisher.publish([b"0", b"1", b"2"])

    log.truncate(partition, 2)

    assert await log.bounds(partition) == Bounds(2, 3)
    subscription = await log.subscribe(partition, "readers", NotingOwner(2))
    assert [record.data for record in await collect(subscription, 1)] == [b"2"]
    await publisher.publish([b"3"])
    assert [record.offset for record in await collect(subscription, 1)] == [3]
    await log.close()


async def test_publishing_fails_as_long_as_the_test_wants() -> None:
    """So a test can show what is released when confirms do not come."""
    log, partition = await memory_partition()
    publisher = await log.publisher(partition)
    log.publish_error = Unconfirmed("as the test wants")

    with pytest.raises(Unconfirmed):
        await publisher.publish([b"lost"])
    log.publish_error = None
    await publisher.publish([b"kept"])

    assert (await log.bounds(partition)).next == 1


async def test_times_are_those_of_the_clock_and_never_go_back() -> None:
    """A test that moves its clock finds the time in the records."""
    clock = MovableClock()
    log = MemoryLog(clock.time)
    await log.declare(StreamSpec("imports"))
    partition = (await log.partitions("imports"))[0]
    publisher = await log.publisher(partition)
    start = int(clock.time() * 1000)
    await publisher.publish([b"0"])
    clock.advance(10)
    await publisher.publish([b"1"])
    clock.step(-5)
    await publisher.publish([b"2"])

    records = await collect(await log.subscribe(partition, "readers", NotingOwner()), 3)

    assert [record.timestamp_ms - start for record in records] == [0, 10_000, 10_000]
    await log.close()


async def test_missing_stream_is_missing_in_memory_too() -> None:
    """A test that forgets to declare fails as production would."""
    with pytest.raises(StreamMissing):
        await MemoryLog().partitions("imports")


async def test_owner_notes_what_it_is_asked() -> None:
    """Also the hand-over, which neither log of this process ever asks for."""
    owner = NotingOwner(7)
    partition = Partition("imports", 0, "imports")

    assert await asyncio.wait_for(owner.activate(partition), 1) == 7
    await owner.deactivate(partition)

    assert (owner.activations, owner.deactivations, owner.active) == (1, 1, False)
