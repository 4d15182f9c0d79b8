"""Reading when the connection does not last: nothing is missed, nothing comes from before the owner's position."""

import asyncio
from typing import Any

import pytest
import rstream
from rstream import schema

from streams import _rabbitmq_connection
from streams._rabbitmq_subscription import CREDIT
from streams.log import Bounds, Partition, Record, Subscription
from streams.testing import NotingOwner, collect, eventually
from tests.support.rabbit import Rabbit


class FollowingOwner(NotingOwner):
    """Answers the position behind the last record that was noted as done, as a database would."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[Record] = []

    def note(self, records: list[Record]) -> None:
        """These are done and committed."""
        self.done += records
        if records:
            self.position = records[-1].offset + 1

    @property
    def bodies(self) -> list[bytes]:
        """What was done, in order."""
        return [record.data for record in self.done]


def numbered(first: int, end: int) -> list[bytes]:
    """Messages that tell their place."""
    return [b"%d" % number for number in range(first, end)]


async def read_until(subscription: Subscription, owner: FollowingOwner, count: int) -> None:
    """Take and commit small portions until so many are done."""
    async with asyncio.timeout(60):
        while len(owner.done) < count:
            await subscription.ready()
            owner.note(subscription.take(min(7, count - len(owner.done))))
            await asyncio.sleep(0)


@pytest.mark.parametrize("way", ["cut", "fin", "freeze and cut"])
async def test_nothing_is_missed_or_repeated_when_the_connection_is_lost(rabbit: Rabbit, way: str) -> None:
    """After each loss the owner names the position, and the next record is exactly that one, in mid-chunk or not."""
    partition = await rabbit.new_partition()
    await rabbit.publish(partition, numbered(0, 500))
    owner = FollowingOwner()
    subscription = await (await rabbit.new_log()).subscribe(partition, "readers", owner)
    for rounds in range(1, 5):
        await read_until(subscription, owner, 100 * rounds)
        if way == "freeze and cut":
            rabbit.proxy.freeze()
        await rabbit.publish(partition, numbered(400 + 100 * rounds, 500 + 100 * rounds))
        if way == "fin":
            rabbit.proxy.fin()
        else:
            rabbit.proxy.cut()

    await read_until(subscription, owner, 900)

    assert owner.bodies == numbered(0, 900)
    assert owner.activations == 5


async def test_nothing_is_handed_out_when_the_connection_is_lost(rabbit: Rabbit) -> None:
    """From that moment another member may be active: what is buffered is not ours any more."""
    partition = await rabbit.new_partition()
    await rabbit.publish(partition, numbered(0, 100))
    owner = FollowingOwner()
    log = await rabbit.new_log()
    subscription = await log.subscribe(partition, "readers", owner)
    await read_until(subscription, owner, 10)
    rabbit.proxy.refusing = True
    rabbit.proxy.cut()

    def is_known() -> None:
        assert not log.connected

    await eventually(is_known)
    assert subscription.take(100) == []
    rabbit.proxy.refusing = False

    await read_until(subscription, owner, 100)
    assert log.connected
    assert owner.bodies == numbered(0, 100)


async def test_only_the_new_record_comes_when_the_connection_is_lost_before_the_first(rabbit: Rabbit) -> None:
    """At the end of a stream with a past, a network blip must not become a replay (O-26)."""
    partition = await rabbit.new_partition()
    await rabbit.publish(partition, numbered(0, 100))
    owner = NotingOwner((await rabbit.spared.bounds(partition)).next)
    subscription = await (await rabbit.new_log()).subscribe(partition, "readers", owner)

    def is_active(times: int) -> None:
        assert owner.activations == times

    await eventually(lambda: is_active(1))
    rabbit.proxy.cut()
    await eventually(lambda: is_active(2))
    await rabbit.publish(partition, [b"new"])

    records = await collect(subscription, 1)
    await rabbit.publish(partition, [b"newer"])

    assert [record.data for record in [*records, *await collect(subscription, 1)]] == [b"new", b"newer"]


async def test_buffer_stays_bounded_when_nobody_takes(rabbit: Rabbit) -> None:
    """Credit returns with the last record of a chunk taken, so no more than CREDIT chunks are ever here."""
    partition = await rabbit.new_partition()
    for first in range(0, 20, 1):
        await rabbit.publish(partition, [b"%d " % first + b"." * 1000] * 10)  # a chunk each, at least
    lazy = await rabbit.spared.subscribe(partition, "lazy", NotingOwner())
    await lazy.ready()
    await rabbit.stored(partition)  # everybody else has read all of it meanwhile

    held = lazy.take(1_000)

    assert 0 < len(held) <= CREDIT * 10
    assert len(held) + len(await collect(lazy, 200 - len(held))) == 200


async def test_records_below_the_position_are_dropped_when_it_lies_beyond_the_end(rabbit: Rabbit) -> None:
    """The broker begins somewhere near the end, below what was asked for; nothing from there may be handed out."""
    partition = await rabbit.new_partition()
    await rabbit.publish(partition, numbered(0, 10))
    owner = NotingOwner(15)
    subscription = await rabbit.spared.subscribe(partition, "readers", owner)
    publisher = await rabbit.spared.publisher(partition)
    waiting = asyncio.create_task(subscription.ready())
    while not waiting.done():
        await publisher.publish([b"one more"])
        await asyncio.wait({waiting}, timeout=0.05)

    assert subscription.take(1)[0].offset >= 15


async def test_owner_is_asked_again_when_the_stream_is_deleted_and_made_anew(rabbit: Rabbit) -> None:
    """The subscription follows; that its position lies beyond the new end is for the owner to see, and visible."""
    partition = await rabbit.new_partition()
    await rabbit.publish(partition, numbered(0, 50))
    owner = FollowingOwner()
    log = await rabbit.new_log()
    subscription = await log.subscribe(partition, "readers", owner)
    await read_until(subscription, owner, 50)
    assert await log.bounds(partition) == Bounds(0, 50)

    await rabbit.management.delete(partition.name)
    await rabbit.spared.declare(rabbit.spec(partition))
    await rabbit.publish(partition, numbered(0, 3))

    def is_active_again() -> None:
        assert owner.activations == 2

    await eventually(is_active_again)
    bounds = await log.bounds(partition)
    assert bounds == Bounds(0, 3)
    assert owner.position > bounds.next
    owner.position = bounds.first
    await subscription.restart()
    assert [record.data for record in await collect(subscription, 3)] == numbered(0, 3)


async def test_first_bound_rises_when_retention_has_dropped_the_beginning(rabbit: Rabbit) -> None:
    """The broker jumps forward without a word (O-22); whoever compares the bounds with its position sees the gap."""
    partition = await rabbit.new_partition(max_bytes=600_000, segment_bytes=200_000)
    before = await rabbit.spared.bounds(partition)
    for _ in range(20):
        await rabbit.publish(partition, [b"." * 1_000] * 100)

    async def is_truncated() -> Bounds:
        bounds = await rabbit.spared.bounds(partition)
        assert bounds.first > 0
        return bounds

    bounds = await eventually(is_truncated)
    assert before == Bounds(0, 0)
    assert bounds.next == 2_000
    subscription = await rabbit.spared.subscribe(partition, "readers", NotingOwner(0))
    assert (await collect(subscription, 1))[0].offset >= bounds.first


async def test_reader_that_died_is_replaced_when_a_frame_cannot_be_decoded(
    rabbit: Rabbit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rstream's reader dies of such a frame without a sign: the connection looks alive and is deaf for ever."""
    partition = await rabbit.new_partition()
    owner = FollowingOwner()
    subscription = await (await rabbit.new_log()).subscribe(partition, "readers", owner)
    await rabbit.publish(partition, numbered(0, 10))
    await read_until(subscription, owner, 10)
    broken, decode = [True], _rabbitmq_connection._decode

    def decode_badly_once(data: bytearray) -> schema.Frame:
        frame = decode(data)
        if isinstance(frame, schema.Deliver) and broken:
            broken.clear()
            raise ValueError("Invalid checksum")
        return frame

    monkeypatch.setattr(_rabbitmq_connection, "_decode", decode_badly_once)
    await rabbit.publish(partition, numbered(10, 20))  # the read that waits already decodes as before
    await read_until(subscription, owner, 20)
    await rabbit.publish(partition, numbered(20, 30))

    await read_until(subscription, owner, 30)

    assert not broken
    assert owner.bodies == numbered(0, 30)


async def test_no_record_is_skipped_when_a_chunk_cannot_be_unpacked(
    rabbit: Rabbit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected error between chunk and record must not lose the rest of the chunk (O-19): it is read again."""
    partition = await rabbit.new_partition()
    await rabbit.publish(partition, numbered(0, 10))
    unpack, failures = schema.Deliver.get_messages, iter([True, True])

    def fail_twice(chunk: schema.Deliver) -> list[bytes]:
        if next(failures, False):
            raise KeyError("codec")
        return unpack(chunk)

    monkeypatch.setattr(schema.Deliver, "get_messages", fail_twice)
    owner = FollowingOwner()
    subscription = await (await rabbit.new_log()).subscribe(partition, "readers", owner)

    await read_until(subscription, owner, 10)

    assert owner.bodies == numbered(0, 10)
    assert owner.activations == 3


async def test_big_reads_are_in_force_when_a_connection_is_open(
    rabbit: Rabbit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred records arrive in a few reads of the socket, not in one per 256 bytes."""
    partition = await rabbit.new_partition()
    await rabbit.publish(partition, [b"." * 1_000] * 100)
    reads: list[int] = []
    read = asyncio.StreamReader.read

    async def counting(reader: asyncio.StreamReader, n: int = -1) -> bytes:
        reads.append(n)
        return await read(reader, n)

    subscription = await rabbit.spared.subscribe(partition, "readers", NotingOwner())
    await collect(subscription, 100)
    monkeypatch.setattr(asyncio.StreamReader, "read", counting)
    await subscription.restart()
    await collect(subscription, 100)

    assert len(reads) < 100


async def publish_compressed(rabbit: Rabbit, partition: Partition, bodies: list[bytes]) -> None:
    """As another client may: several messages in one entry, compressed."""
    confirmed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    async with rstream.Producer(
        rabbit.services.host,
        rabbit.services.stream_port,
        username=rabbit.services.user,
        password=rabbit.services.password,
    ) as producer:
        await producer.send_sub_entry(
            partition.name,
            [rstream.RawMessage(body) for body in bodies],
            rstream.CompressionType.Gzip,
            on_publish_confirm=confirmed.set_result,
        )
        await asyncio.wait_for(confirmed, 10)


async def test_compressed_entries_of_other_clients_are_read_record_by_record(rabbit: Rabbit) -> None:
    """Any stream client may write to a stream of ours; each message of a compressed entry has its own offset."""
    partition = await rabbit.new_partition()
    await rabbit.publish(partition, [b"before"])
    await publish_compressed(rabbit, partition, [b"one", b"two", b"three"])
    await rabbit.publish(partition, [b"after"])

    subscription = await rabbit.spared.subscribe(partition, "readers", NotingOwner(2))

    records = await collect(subscription, 3)
    assert [(record.offset, record.data) for record in records] == [(2, b"two"), (3, b"three"), (4, b"after")]
    assert await rabbit.spared.bounds(partition) == Bounds(0, 5)
