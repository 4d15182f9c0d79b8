"""What the embedded log drops, and when: by age, by size, while publishing and at opening."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from streams.embedded import EmbeddedLog
from streams.log import Bounds, Partition, StreamSpec
from streams.testing import MovableClock, NotingOwner, collect

HOUR = 3_600


@pytest.fixture
def clock() -> MovableClock:
    """The clock of the log under test."""
    return MovableClock()


@pytest.fixture
async def log(tmp_path: Path, clock: MovableClock) -> AsyncIterator[EmbeddedLog]:
    """An opened log."""
    log = EmbeddedLog(tmp_path / "log.db", clock.time)
    await log.open()
    yield log
    await log.close()


async def declare(log: EmbeddedLog, max_age_seconds: int = HOUR, max_bytes: int = 1_000_000) -> Partition:
    """A plain stream with this retention."""
    await log.declare(StreamSpec("imports", 0, max_age_seconds, max_bytes))
    return (await log.partitions("imports"))[0]


async def test_old_records_go_when_the_next_one_is_published(log: EmbeddedLog, clock: MovableClock) -> None:
    """Age is counted from the time of the record."""
    partition = await declare(log)
    publisher = await log.publisher(partition)
    await publisher.publish([b"a", b"b"])
    clock.advance(HOUR / 2)
    await publisher.publish([b"c"])
    clock.advance(HOUR / 2 + 1)

    await publisher.publish([b"d"])

    assert await log.bounds(partition) == Bounds(2, 4)


async def test_oldest_records_go_when_there_are_too_many_bytes(log: EmbeddedLog) -> None:
    """No more are dropped than the size asks for."""
    partition = await declare(log, max_bytes=1_000)
    publisher = await log.publisher(partition)
    for _ in range(25):
        await publisher.publish([b"x" * 100])

    assert await log.bounds(partition) == Bounds(15, 25)


async def test_newest_record_stays_whatever_retention_says(log: EmbeddedLog, clock: MovableClock) -> None:
    """A message that alone is above the limit is still delivered."""
    partition = await declare(log, max_age_seconds=1, max_bytes=10)
    publisher = await log.publisher(partition)
    await publisher.publish([b"x" * 100])
    clock.advance(HOUR)
    await publisher.publish([b"y" * 100])

    assert await log.bounds(partition) == Bounds(1, 2)


async def test_old_records_go_when_the_log_is_opened(log: EmbeddedLog, clock: MovableClock) -> None:
    """A machine that was off for a week does not begin with records of the week before; thousands go in small steps."""
    partition = await declare(log)
    publisher = await log.publisher(partition)
    for _ in range(3):
        await publisher.publish([b"old"] * 1_000)
    await log.close()
    clock.advance(HOUR + 1)

    await log.open()

    assert await log.bounds(partition) == Bounds(2_999, 3_000)


async def test_new_retention_applies_when_the_stream_is_declared_again(log: EmbeddedLog) -> None:
    """Retention comes from settings, and settings change."""
    publisher = await log.publisher(await declare(log))
    await publisher.publish([b"x" * 100] * 20)

    partition = await declare(log, max_bytes=500)
    await publisher.publish([b"x" * 100])

    assert await log.bounds(partition) == Bounds(16, 21)


async def test_large_backlog_goes_in_steps_when_retention_shrinks(log: EmbeddedLog) -> None:
    """One publish must not wait until millions are deleted."""
    publisher = await log.publisher(await declare(log))
    for _ in range(5):
        await publisher.publish([b"x"] * 1_000)

    partition = await declare(log, max_bytes=1)
    firsts = []
    for _ in range(6):
        await publisher.publish([b"y"])
        firsts.append((await log.bounds(partition)).first)

    assert firsts == [1_000, 2_000, 3_000, 4_000, 5_000, 5_005]


async def test_ids_are_remembered_when_their_records_are_gone(log: EmbeddedLog) -> None:
    """Retention must not make a publisher's repeats look new."""
    partition = await declare(log, max_bytes=1)
    publisher = await log.publisher(partition, "splitter")
    await publisher.publish([b"1", b"2"], [1, 2])
    await publisher.publish([b"3"], [3])

    await publisher.publish([b"1", b"2", b"3"], [1, 2, 3])

    assert await log.bounds(partition) == Bounds(2, 3)


async def test_times_never_go_back_when_the_clock_does(log: EmbeddedLog, clock: MovableClock) -> None:
    """A replay by time looks for the first record at or after it."""
    partition = await declare(log)
    publisher = await log.publisher(partition)
    start = int(clock.time() * 1000)
    await publisher.publish([b"a"])
    clock.step(-60)
    await publisher.publish([b"b"])

    records = await collect(await log.subscribe(partition, "readers", NotingOwner()), 2)

    assert [record.timestamp_ms for record in records] == [start, start]
