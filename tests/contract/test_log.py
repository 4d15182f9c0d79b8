"""What every log does, whatever it is made of: publishing, reading, bounds. The engine relies on this alone."""

import asyncio

import pytest

from streams.log import MAX_MESSAGE_BYTES, Bounds, Log, Partition, Record
from streams.testing import NotingOwner, collect, eventually
from tests.contract.moves import LIMIT, check_equal, data, numbered, publish, read, stored
from tests.contract.places import Place


async def test_records_come_in_publishing_order_when_read_from_the_start(log: Log, partition: Partition) -> None:
    """Several calls, one order; offsets rise and times never go back."""
    publisher = await log.publisher(partition)
    for first in range(0, 3_000, 1_000):
        await publisher.publish(numbered(1_000, first))

    records = await read(log, partition, 3_000)

    assert data(records) == numbered(3_000)
    offsets = [record.offset for record in records]
    assert offsets == sorted(set(offsets))
    times = [record.timestamp_ms for record in records]
    assert times == sorted(times)
    assert times[0] > 1_600_000_000_000


@pytest.mark.parametrize("start", [0, 1, 57, 99])
async def test_first_record_is_the_one_asked_for_when_activated_in_the_middle(
    log: Log, partition: Partition, start: int
) -> None:
    """Whatever a chunk holds before the position is not delivered."""
    await publish(log, partition, numbered(100))
    offsets = [record.offset for record in await read(log, partition, 100)]

    records = await read(log, partition, 100 - start, position=offsets[start])

    assert [record.offset for record in records] == offsets[start:]


async def test_only_new_records_come_when_activated_at_the_end(log: Log, partition: Partition) -> None:
    """The position after the last record is a legal one and waits for the next."""
    await publish(log, partition, numbered(10))
    end = (await log.bounds(partition)).next
    subscription = await log.subscribe(partition, "readers", NotingOwner(end))

    await publish(log, partition, [b"new"])

    assert data(await collect(subscription, 1)) == [b"new"]


async def test_take_gives_no_more_than_its_limit(log: Log, partition: Partition) -> None:
    """What is not taken stays for the next call, in order."""
    await publish(log, partition, numbered(10))
    subscription = await log.subscribe(partition, "readers", NotingOwner())
    taken: list[list[Record]] = []
    while sum(map(len, taken)) < 10:
        await asyncio.wait_for(subscription.ready(), LIMIT)
        taken.append(subscription.take(3))

    assert all(0 < len(part) <= 3 for part in taken)
    assert data([record for part in taken for record in part]) == numbered(10)


async def test_take_gives_nothing_when_nothing_is_there(log: Log, partition: Partition) -> None:
    """It never waits and never raises."""
    subscription = await log.subscribe(partition, "readers", NotingOwner())

    assert subscription.take(10) == []


async def test_ready_returns_when_a_record_arrives(log: Log, partition: Partition) -> None:
    """It waits while there is nothing, and not a moment longer."""
    owner = NotingOwner()
    subscription = await log.subscribe(partition, "readers", owner)
    waiting = asyncio.create_task(subscription.ready())
    await eventually(lambda: check_equal(owner.active, True))
    assert not waiting.done()

    await publish(log, partition, [b"one"])

    await asyncio.wait_for(waiting, LIMIT)
    assert data(subscription.take(10)) == [b"one"]


async def test_nothing_is_missed_when_ready_is_cancelled(log: Log, partition: Partition) -> None:
    """The runtime waits for records and for results at once, and cancels whichever comes second."""
    subscription = await log.subscribe(partition, "readers", NotingOwner())
    publisher = await log.publisher(partition)
    taken: list[Record] = []
    for number in range(5):
        waiting = asyncio.create_task(subscription.ready())
        await asyncio.sleep(0)
        waiting.cancel()
        await publisher.publish(numbered(1, number))
        waiting = asyncio.create_task(subscription.ready())
        await asyncio.sleep(0)
        waiting.cancel()
        taken += await collect(subscription, 1)

    assert data(taken) == numbered(5)


async def test_calls_do_not_mix_when_they_overlap(log: Log, partition: Partition) -> None:
    """Calls of one publisher are served one after another."""
    publisher = await log.publisher(partition)

    await asyncio.gather(*(publisher.publish(numbered(1_200, first)) for first in range(0, 6_000, 1_200)))

    assert data(await read(log, partition, 6_000)) == numbered(6_000)


async def test_nothing_happens_when_no_message_is_given(log: Log, partition: Partition) -> None:
    """An empty call is confirmed at once."""
    publisher = await log.publisher(partition)

    await asyncio.wait_for(publisher.publish([]), LIMIT)

    assert await stored(log, partition) == []


async def test_bytes_come_back_unchanged_when_they_are_of_any_kind(log: Log, partition: Partition) -> None:
    """A log does not look into its messages: zeros, all byte values, one byte, the largest size."""
    messages = [b"\0", bytes(range(256)), b"x", b"\xff" * MAX_MESSAGE_BYTES]
    await publish(log, partition, messages)

    assert data(await read(log, partition, 4)) == messages


async def test_nothing_of_the_call_is_sent_when_one_message_is_too_large(log: Log, partition: Partition) -> None:
    """The size is checked before the first message goes out."""
    publisher = await log.publisher(partition)

    with pytest.raises(ValueError, match="1000001"):
        await publisher.publish([b"small", b"x" * (MAX_MESSAGE_BYTES + 1)])

    assert await stored(log, partition) == []


async def test_reader_wakes_when_another_instance_publishes(place: Place, log: Log, partition: Partition) -> None:
    """`publish` on the command line is another process than the splitter."""
    owner = NotingOwner()
    subscription = await log.subscribe(partition, "readers", owner)
    waiting = asyncio.create_task(subscription.ready())
    await eventually(lambda: check_equal(owner.active, True))

    await publish(await place.connect(), partition, [b"from elsewhere"])

    await asyncio.wait_for(waiting, LIMIT)
    assert data(subscription.take(1)) == [b"from elsewhere"]


@pytest.mark.parametrize("place", ["embedded", "rabbitmq"], indirect=True)
async def test_confirmed_messages_are_there_when_the_log_is_opened_again(
    place: Place, log: Log, partition: Partition
) -> None:
    """Confirmed means stored. (The log in memory promises nothing of the kind.)"""
    await publish(log, partition, numbered(50))
    before = await log.bounds(partition)
    await log.close()

    again = await place.connect()

    assert await again.bounds(partition) == before
    assert data(await read(again, partition, 50)) == numbered(50)


async def test_read_ahead_is_bounded_when_nobody_takes(place: Place, log: Log, partition: Partition) -> None:
    """A subscription reads a little ahead, not the backlog; the rest comes when it is wanted."""
    publisher = await log.publisher(partition)
    for first in range(0, 20_000, 1_000):
        await publisher.publish([b"%08d" % number + b"." * 1_000 for number in range(first, first + 1_000)])
    lazy = await log.subscribe(partition, "lazy", NotingOwner())

    assert len(await read(log, partition, 20_000, group="busy")) == 20_000  # as long as this takes, nobody takes
    held = lazy.take(1_000_000)

    assert 0 < len(held) <= place.read_ahead
    rest = await collect(lazy, 20_000 - len(held))
    assert [int(record.data[:8]) for record in held + rest] == list(range(20_000))


# ---- bounds


async def test_bounds_are_equal_when_the_stream_is_empty(log: Log, partition: Partition) -> None:
    """Equal bounds mean that there is nothing to read."""
    bounds = await log.bounds(partition)

    assert bounds.first == bounds.next


@pytest.mark.parametrize("count", [1, 2, 205])
async def test_bounds_are_exact_when_something_was_published(log: Log, partition: Partition, count: int) -> None:
    """`first` is the first record's offset and `next` one more than the last one's, not that of a chunk."""
    await publish(log, partition, numbered(count))

    records = await read(log, partition, count)

    assert await log.bounds(partition) == Bounds(records[0].offset, records[-1].offset + 1)


async def test_next_of_the_bounds_grows_with_every_confirm(log: Log, partition: Partition) -> None:
    """A confirm and the bounds asked after it agree."""
    publisher = await log.publisher(partition)
    await publisher.publish(numbered(3))
    before = await log.bounds(partition)

    await publisher.publish(numbered(4))

    after = await log.bounds(partition)
    assert after.first == before.first
    assert after.next >= before.next + 4
