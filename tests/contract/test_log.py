"""What every log does, whatever it is made of. A processor relies on this and on nothing else."""

import asyncio
from typing import Self

import pytest

from streams.errors import LogRefused, StreamMissing
from streams.log import MAX_MESSAGE_BYTES, Bounds, Log, Partition, Record, StreamSpec, Subscription
from streams.testing import NotingOwner, collect, eventually
from tests.contract.places import Place

LIMIT = 15.0
"""Seconds within which what is bounded in time must end."""


def numbered(count: int, first: int = 0) -> list[bytes]:
    """Messages that tell their place in the order of publishing."""
    return [f"message {number}".encode() for number in range(first, first + count)]


def data(records: list[Record]) -> list[bytes]:
    """What was published, without where and when it was stored."""
    return [record.data for record in records]


async def publish(log: Log, partition: Partition, messages: list[bytes]) -> None:
    """Publish without a name through a publisher of its own."""
    publisher = await log.publisher(partition)
    await publisher.publish(messages)
    await publisher.close()


async def read(log: Log, partition: Partition, count: int, position: int = 0, group: str = "readers") -> list[Record]:
    """Subscribe at `position`, collect `count` records, close."""
    subscription = await log.subscribe(partition, group, NotingOwner(position))
    records = await collect(subscription, count)
    await subscription.close()
    return records


async def stored(log: Log, partition: Partition) -> list[bytes]:
    """All that is stored, found by a mark published behind it."""
    await publish(log, partition, [b"the end"])
    subscription = await log.subscribe(partition, "auditors", NotingOwner())
    found: list[bytes] = []
    while not found or found[-1] != b"the end":
        found += data(await collect(subscription, 1))
    await subscription.close()
    return found[:-1]


# ---- publishing and reading


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
    await eventually(lambda: _is(owner.active, True))
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
    await eventually(lambda: _is(owner.active, True))

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


# ---- publishing under a name


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


# ---- declaring


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


# ---- activation


async def test_delivery_waits_when_activation_takes_long(log: Log, partition: Partition) -> None:
    """A slow database delays what is read and loses none of it."""
    await publish(log, partition, numbered(5))
    owner = NotingOwner()
    owner.may_answer.clear()
    subscription = await log.subscribe(partition, "readers", owner)
    await eventually(lambda: _is(owner.activations, 1))
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
    await eventually(lambda: _is(owner.activations, 2))
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
    await eventually(lambda: _is(owner.activations, 1))

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
    await eventually(lambda: _is(owner.activations, 1))

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


# ---- groups


async def test_groups_read_independently(log: Log, partition: Partition) -> None:
    """Two processors on one stream each see all of it."""
    await publish(log, partition, numbered(10))
    one = await log.subscribe(partition, "one", NotingOwner())
    two = await log.subscribe(partition, "two", NotingOwner())

    assert data(await collect(one, 10)) == numbered(10)
    assert data(await collect(two, 10)) == numbered(10)


async def test_second_member_reads_when_the_first_has_closed(place: Place, log: Log, partition: Partition) -> None:
    """One member of a group is active at a time; the next one begins where the database says."""
    await publish(log, partition, numbered(100))
    first, second = NotingOwner(), NotingOwner()
    active = await log.subscribe(partition, "group", first)
    taken = await collect(active, 40)
    standby = await (await place.second_member(log)).subscribe(partition, "group", second)
    taken += await collect(active, 20)
    assert second.activations == 0
    assert standby.take(10) == []

    second.position = taken[-1].offset + 1
    await active.close()

    taken += await collect(standby, 40)
    assert data(taken) == numbered(100)
    assert second.activations == 1


async def test_owner_is_not_called_after_close(place: Place, log: Log, partition: Partition) -> None:
    """What is closed takes no part in the group any more."""
    first, second = NotingOwner(), NotingOwner()
    active = await log.subscribe(partition, "group", first)
    standby = await (await place.second_member(log)).subscribe(partition, "group", second)
    await eventually(lambda: _is(first.active, True))
    await standby.close()

    await active.close()
    await publish(log, partition, numbered(1))
    await read(log, partition, 1)

    assert (second.activations, first.activations, first.deactivations) == (0, 1, 0)


async def test_each_record_is_committed_once_when_members_come_and_go(place: Place, log: Log) -> None:
    """The rule for hand-over: deactivate waits for the work in hand and its commit, then the other one is asked."""
    partitions = await place.new_stream(log, 3)
    ledger: dict[str, list[Record]] = {partition.name: [] for partition in partitions}
    first = [await Member.join(log, partition, ledger) for partition in partitions]
    for partition in partitions:
        await publish(log, partition, numbered(300))
    await eventually(lambda: _is([len(lines) >= 50 for lines in ledger.values()], [True] * 3))

    other = await place.second_member(log)
    second = [await Member.join(other, partition, ledger) for partition in partitions]
    for partition in partitions:
        await publish(log, partition, numbered(300, first=300))
    await eventually(lambda: _is([len(lines) >= 400 for lines in ledger.values()], [True] * 3))
    for member in first:
        await member.leave()

    await eventually(lambda: _is([len(lines) for lines in ledger.values()], [600] * 3))
    for member in second:
        await member.leave()
    assert [data(lines) for lines in ledger.values()] == [numbered(600)] * 3


class Member(NotingOwner):
    """A processor in small: takes a few records, works, commits them together with the position in a ledger."""

    _subscription: Subscription
    _work: asyncio.Task[None]

    def __init__(self, ledger: dict[str, list[Record]]) -> None:
        super().__init__()
        self._ledger = ledger
        self._hands = asyncio.Lock()

    @classmethod
    async def join(cls, log: Log, partition: Partition, ledger: dict[str, list[Record]]) -> Self:
        """Subscribe and begin to work."""
        member = cls(ledger)
        member._subscription = await log.subscribe(partition, "group", member)
        member._work = asyncio.create_task(member._run())
        return member

    async def activate(self, partition: Partition) -> int:
        """Begin behind the last line of the ledger."""
        async with self._hands:
            lines = self._ledger[partition.name]
            self.active = True
            return lines[-1].offset + 1 if lines else 0

    async def deactivate(self, partition: Partition) -> None:
        """Finish the turn in hand."""
        async with self._hands:
            self.active = False

    async def leave(self) -> None:
        """Stop between two turns and leave the group."""
        async with self._hands:
            self._work.cancel()
        await self._subscription.close()

    async def _run(self) -> None:
        while True:
            await self._subscription.ready()
            async with self._hands:
                records = self._subscription.take(7) if self.active else []
                await asyncio.sleep(0.001)  # the work
                self._ledger[self._subscription.partition.name] += records
            await asyncio.sleep(0)


def _is(found: object, wanted: object) -> None:
    assert found == wanted
