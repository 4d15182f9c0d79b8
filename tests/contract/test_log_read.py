"""A range is read as it is stored, beside whoever reads as a member of a group."""

import pytest

from streams.log import Log, Partition
from streams.testing import NotingOwner, collect
from tests.contract.moves import data, numbered, publish
from tests.contract.places import Place


async def ranged(log: Log, partition: Partition, first: int, end: int) -> list[bytes]:
    """What `read` gives, all pages in a row."""
    return [record.data async for page in log.read(partition, first, end) for record in page]


@pytest.mark.parametrize(("first", "end"), [(0, 5_000), (17, 4_321), (4_999, 5_000), (7, 7), (9, 3)])
async def test_exactly_the_records_of_the_range_come(log: Log, partition: Partition, first: int, end: int) -> None:
    """Neither what a chunk or page holds before it, nor what follows."""
    await publish(log, partition, numbered(5_000))

    assert await ranged(log, partition, first, end) == numbered(5_000)[first:end]


async def test_range_is_read_when_another_process_reads_as_a_member(place: Place, log: Log) -> None:
    """Each gets everything; on the embedded log the file is claimed by the other one."""
    partition = (await place.new_stream(log, 3))[1]
    await publish(log, partition, numbered(20))
    subscription = await log.subscribe(partition, "readers", NotingOwner())
    beside = await place.connect()

    assert await ranged(beside, partition, 0, 20) == numbered(20)
    assert data(await collect(subscription, 20)) == numbered(20)
