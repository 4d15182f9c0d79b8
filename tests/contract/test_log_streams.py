"""Declaring streams and finding their partitions."""

import pytest

from streams.errors import LogRefused, StreamMissing
from streams.log import Log, Partition, StreamSpec
from tests.contract.moves import numbered, publish, read, stored
from tests.contract.places import Place


async def test_declaring_again_changes_nothing(log: Log, place: Place) -> None:
    """Every processor declares what it uses."""
    for partitions in (0, 3):
        spec = StreamSpec(place.new_name(), partitions)
        await log.declare(spec)
        before = await log.partitions(spec.name)
        await publish(log, before[0], [b"kept"])

        await log.declare(spec)

        assert await log.partitions(spec.name) == before
        assert await stored(log, before[0]) == [b"kept"]


@pytest.mark.parametrize(("is_", "wanted"), [(2, 3), (3, 2), (0, 2), (2, 0)])
async def test_declaring_is_refused_when_the_number_of_partitions_differs(
    log: Log, place: Place, is_: int, wanted: int
) -> None:
    """Another number would send a key to another partition than before."""
    name = place.new_name()
    await log.declare(StreamSpec(name, is_))

    with pytest.raises(LogRefused, match=name):
        await log.declare(StreamSpec(name, wanted))

    assert len(await log.partitions(name)) == max(is_, 1)


async def test_plain_stream_has_one_partition_with_its_own_name(log: Log, place: Place) -> None:
    """Any client finds a plain stream under its name."""
    name = place.new_name()
    await log.declare(StreamSpec(name))

    assert await log.partitions(name) == [Partition(name, 0, name)]


async def test_super_stream_has_its_partitions_in_order(log: Log, place: Place) -> None:
    """The place in the list is the index that the route answers."""
    name = place.new_name()
    await log.declare(StreamSpec(name, 3))

    assert await log.partitions(name) == [Partition(name, index, f"{name}-{index}") for index in range(3)]


async def test_partitions_are_separate_logs(log: Log, place: Place) -> None:
    """What is written to one partition is read from it alone."""
    partitions = await place.new_stream(log, 3)
    for partition in partitions:
        await publish(log, partition, numbered(20, first=100 * partition.index))

    for partition in partitions:
        assert await stored(log, partition) == numbered(20, first=100 * partition.index)


async def test_missing_stream_is_refused(log: Log, place: Place) -> None:
    """Nothing is created by asking."""
    name = place.new_name()
    missing = Partition(name, 0, name)

    with pytest.raises(StreamMissing, match=name):
        await log.partitions(name)
    with pytest.raises(StreamMissing, match=name):
        await log.bounds(missing)
    with pytest.raises(StreamMissing, match=name):
        await (await log.publisher(missing)).publish([b"lost"])


async def test_age_of_what_is_unread_is_that_of_its_first_record(log: Log, place: Place) -> None:
    """Lag in seconds is asked from any process, without becoming a reader."""
    (partition,) = await place.new_stream(log)
    assert await log.written_at(partition, 0) is None
    await publish(log, partition, numbered(3))
    await publish(log, partition, numbered(3))
    first, *_, last = await read(log, partition, 6)

    assert await log.written_at(partition, first.offset) == first.timestamp_ms
    assert await log.written_at(partition, last.offset) == last.timestamp_ms
    assert await log.written_at(partition, last.offset + 1) is None
