"""For those who write a processor, and for our own tests: a log in memory, a clock moved by hand, helpers that wait.

Nothing here opens a socket or starts a thread, and nothing here is used in production.
"""

import asyncio
import inspect
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TypeVar, overload

from streams._paged import PAGE_BYTES, PAGE_RECORDS, PagedSubscription, read_pages
from streams._publishing import check_call
from streams.errors import LogRefused, StreamMissing
from streams.log import Bounds, Owner, Partition, Publisher, Record, StreamSpec, Subscription

T = TypeVar("T")

PATIENCE = 20.0
"""Seconds after which a helper gives up. Long, because a test that passes never waits for it."""


@dataclass
class MovableClock:
    """Two clocks that stand still until a test moves them: one that only goes forward, one that people set."""

    _wall: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    _monotonic: float = 1000.0

    def monotonic(self) -> float:
        """Seconds since some moment, as `time.monotonic` counts them."""
        return self._monotonic

    def time(self) -> float:
        """Seconds since 1970, as `time.time` tells them."""
        return self._wall.timestamp()

    def now(self) -> datetime:
        """The date and time of day in UTC."""
        return self._wall

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks."""
        self._monotonic += seconds
        self._wall += timedelta(seconds=seconds)

    def step(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an operator or NTP does; no time passes."""
        self._wall += timedelta(seconds=seconds)


@overload
async def eventually(assertion: Callable[[], Awaitable[T]], timeout: float = PATIENCE) -> T: ...
@overload
async def eventually(assertion: Callable[[], T], timeout: float = PATIENCE) -> T: ...
async def eventually(assertion: Callable[[], T | Awaitable[T]], timeout: float = PATIENCE) -> T:
    """Call `assertion` until it raises no AssertionError, answer its result; after `timeout` seconds raise its last."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + timeout
    while True:
        try:
            result = assertion()
            return await result if inspect.isawaitable(result) else result
        except AssertionError:
            if loop.time() >= give_up:
                raise
        await asyncio.sleep(0.01)


async def collect(subscription: Subscription, count: int, timeout: float = PATIENCE) -> list[Record]:
    """Take until `count` records have come, never more than those; TimeoutError says how many came instead."""
    records: list[Record] = []
    try:
        async with asyncio.timeout(timeout):
            while len(records) < count:
                await subscription.ready()
                records += subscription.take(count - len(records))
    except TimeoutError:
        raise TimeoutError(f"{len(records)} of {count} records came within {timeout} s") from None
    return records


class NotingOwner:
    """An `Owner` that answers the `position` its test has set, and notes what it was asked."""

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self.activations = 0
        self.deactivations = 0
        self.active = False
        self.may_answer = asyncio.Event()
        """Clear it to let the next activation take as long as the test wants."""
        self.may_answer.set()

    async def activate(self, partition: Partition) -> int:  # noqa: ARG002
        """Note the call, wait for `may_answer`, answer `position`."""
        self.activations += 1
        await self.may_answer.wait()
        self.active = True
        return self.position

    async def deactivate(self, partition: Partition) -> None:  # noqa: ARG002
        """Note the call."""
        self.deactivations += 1
        self.active = False


@dataclass
class _Stored:
    """What one partition holds."""

    first: int = 0
    records: list[Record] = field(default_factory=list)
    highest: dict[str, int] = field(default_factory=dict)

    @property
    def next(self) -> int:
        return self.first + len(self.records)


class MemoryLog:
    """A `Log` that lives as long as its object: the contract of a log without a file, a thread or retention."""

    def __init__(self, time: Callable[[], float] = time.time) -> None:
        self._time = time
        self._specs: dict[str, StreamSpec] = {}
        self._stored: dict[str, _Stored] = {}
        self._turns: dict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._subscriptions: list[PagedSubscription] = []
        self.connected = True
        """A test may say otherwise."""
        self.publish_error: Exception | None = None
        """While set, every call of a publisher raises it and stores nothing."""

    async def open(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """End the subscriptions; what is stored stays."""
        while self._subscriptions:
            await self._subscriptions.pop().close()

    async def declare(self, spec: StreamSpec) -> None:
        """Create the stream if it is missing."""
        known = self._specs.setdefault(spec.name, spec)
        if known.partitions != spec.partitions:
            raise LogRefused(f"Stream {spec.name} has {known.partitions} partitions, not {spec.partitions}.")
        for partition in await self.partitions(spec.name):
            self._stored.setdefault(partition.name, _Stored())

    async def partitions(self, stream: str) -> list[Partition]:
        """The partitions in order."""
        if stream not in self._specs:
            raise StreamMissing(f"There is no stream {stream}.")
        count = self._specs[stream].partitions
        return [Partition(stream, index, f"{stream}-{index}") for index in range(count)] or [
            Partition(stream, 0, stream)
        ]

    async def bounds(self, partition: Partition) -> Bounds:
        """The exact bounds."""
        stored = self._find(partition)
        return Bounds(stored.first, stored.next)

    async def written_at(self, partition: Partition, offset: int) -> int | None:
        """When the first record at or after `offset` was written."""
        records = self._find(partition).records
        return next((record.timestamp_ms for record in records if record.offset >= offset), None)

    def read(self, partition: Partition, first: int, end: int) -> AsyncIterator[list[Record]]:
        """The records of a range."""
        return read_pages(self._read_page, partition, first, end)

    async def subscribe(self, partition: Partition, group: str, owner: Owner) -> PagedSubscription:
        """Join the group; its members are active in the order in which they joined."""
        self._find(partition)
        turn = self._turns[group, partition.name]
        subscription = PagedSubscription(partition, owner, turn, self._read_page)
        self._subscriptions = [*(other for other in self._subscriptions if other.is_open), subscription]
        return subscription

    async def publisher(self, partition: Partition, name: str | None = None) -> Publisher:
        """A publisher whose calls are atomic."""
        self._find(partition)
        return _MemoryPublisher(self, partition, name)

    def truncate(self, partition: Partition, first: int) -> None:
        """Drop what is stored below `first`, as retention does."""
        stored = self._find(partition)
        del stored.records[: first - stored.first]
        stored.first = first

    def store(
        self, partition: Partition, messages: Sequence[bytes], ids: Sequence[int] | None, name: str | None
    ) -> None:
        """What a publisher does with a call."""
        if self.publish_error:
            raise self.publish_error
        check_call(messages, ids, named=name is not None)
        stored = self._find(partition)
        now = max(int(self._time() * 1000), stored.records[-1].timestamp_ms if stored.records else 0)
        for message, id_ in (
            zip(messages, ids or (), strict=True) if name else ((message, None) for message in messages)
        ):
            if name and id_ is not None:
                if id_ <= stored.highest.get(name, -1):
                    continue
                stored.highest[name] = id_
            stored.records.append(Record(stored.next, now, bytes(message)))
        for subscription in self._subscriptions:
            subscription.look_again()

    async def _read_page(self, partition: Partition, position: int) -> list[Record]:
        stored = self._find(partition)
        page: list[Record] = []
        size = 0
        start = max(position - stored.first, 0)
        for record in stored.records[start : start + PAGE_RECORDS]:
            page.append(record)
            size += len(record.data)
            if size >= PAGE_BYTES:
                break
        return page

    def _find(self, partition: Partition) -> _Stored:
        if partition.name not in self._stored:
            raise StreamMissing(f"There is no partition {partition.name}.")
        return self._stored[partition.name]


@dataclass
class _MemoryPublisher:
    log: MemoryLog
    partition: Partition
    name: str | None

    async def publish(self, messages: Sequence[bytes], ids: Sequence[int] | None = None) -> None:
        self.log.store(self.partition, messages, ids, self.name)

    async def close(self) -> None:
        pass
