"""Publishing under a name: what is stored once although it is published twice."""

import pytest

from streams.log import MAX_MESSAGE_BYTES, Log, Partition
from tests.contract.moves import numbered, stored
from tests.contract.places import Place


async def test_message_is_stored_once_when_its_id_comes_again(log: Log, partition: Partition) -> None:
    """Ids at or below the highest are confirmed and dropped, also in a call that brings new ones."""
    publisher = await log.publisher(partition, "splitter")
    await publisher.publish([b"10", b"20", b"30"], [10, 20, 30])

    await publisher.publish([b"10", b"15", b"30", b"31"], [10, 15, 30, 31])
    await publisher.publish([b"31"], [31])

    assert await stored(log, partition) == [b"10", b"20", b"30", b"31"]


async def test_message_is_stored_once_when_a_new_publisher_of_the_name_repeats_it(
    place: Place, log: Log, partition: Partition
) -> None:
    """The name carries the highest id from one life of a processor to the next."""
    first = await log.publisher(partition, "splitter")
    await first.publish(numbered(100), range(1, 101))
    await first.close()

    second = await (await place.connect()).publisher(partition, "splitter")
    await second.publish(numbered(150), range(1, 151))

    assert await stored(log, partition) == numbered(150)


async def test_id_zero_is_an_id(log: Log, partition: Partition) -> None:
    """The first item of the first record of a stream has the id 0."""
    publisher = await log.publisher(partition, "splitter")

    await publisher.publish([b"zero", b"one"], [0, 1])
    await publisher.publish([b"zero", b"one"], [0, 1])

    assert await stored(log, partition) == [b"zero", b"one"]


async def test_ids_may_be_as_large_as_offset_times_stride(log: Log, partition: Partition) -> None:
    """Ids are 63 bits wide and may jump."""
    publisher = await log.publisher(partition, "splitter")
    large = 2**62

    await publisher.publish([b"a", b"b"], [5, large])
    await publisher.publish([b"b", b"c"], [large, large + 1])

    assert await stored(log, partition) == [b"a", b"b", b"c"]


async def test_names_do_not_know_of_each_other(log: Log, partition: Partition) -> None:
    """A new epoch publishes under a new name, so that a replay is not swallowed."""
    for name in ("epoch 1", "epoch 2"):
        publisher = await log.publisher(partition, name)
        await publisher.publish([name.encode()], [7])

    assert await stored(log, partition) == [b"epoch 1", b"epoch 2"]


async def test_partitions_do_not_know_of_each_others_ids(place: Place, log: Log) -> None:
    """The ids of a name need to rise in each partition only."""
    for partition in await place.new_stream(log, 2):
        publisher = await log.publisher(partition, "splitter")
        await publisher.publish([b"seven"], [7])

        assert await stored(log, partition) == [b"seven"]


async def test_everything_is_stored_when_the_publisher_has_no_name(log: Log, partition: Partition) -> None:
    """Without a name there is nothing to compare with."""
    publisher = await log.publisher(partition)

    await publisher.publish([b"same"])
    await publisher.publish([b"same"])

    assert await stored(log, partition) == [b"same", b"same"]


@pytest.mark.parametrize("ids", [None, [1], [1, 1], [2, 1]], ids=["none", "too few", "equal", "falling"])
async def test_nothing_is_sent_when_the_ids_of_a_named_publisher_do_not_rise(
    log: Log, partition: Partition, ids: list[int] | None
) -> None:
    """Ids out of order would be dropped with a positive confirm, so they are a mistake of the caller."""
    publisher = await log.publisher(partition, "splitter")

    with pytest.raises(ValueError, match="id"):
        await publisher.publish([b"a", b"b"], ids)

    assert await stored(log, partition) == []


async def test_no_id_is_used_up_when_a_message_of_the_call_is_too_large(log: Log, partition: Partition) -> None:
    """A refused call may be made again without the large one."""
    publisher = await log.publisher(partition, "splitter")
    with pytest.raises(ValueError, match="1000001"):
        await publisher.publish([b"small", b"x" * (MAX_MESSAGE_BYTES + 1)], [1, 2])

    await publisher.publish([b"small"], [1])

    assert await stored(log, partition) == [b"small"]
