"""What the engine needs of a log: read from a position, publish confirmed, know the bounds.

Two implementations pass one contract suite (`tests/contract`): `rabbitmq.py` and `embedded.py`. A log moves opaque
bytes; what they mean is `message.py`'s business. A log remembers no offsets: the position of a reader lives in the
database.
"""

import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Record(NamedTuple):
    """One entry as it was read. Offsets rise but have gaps; the timestamp (ms since 1970) is that of its chunk."""

    offset: int
    timestamp_ms: int
    data: bytes


class Bounds(NamedTuple):
    """The first offset that can still be read and the one that the next record will get (equal: nothing to read)."""

    first: int
    next: int


@dataclass(frozen=True, slots=True)
class Partition:
    """One ordered log. `stream` is the logical name, `name` what the broker calls this partition."""

    stream: str
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A stream as it should be: 0 partitions = a plain stream, n > 0 = a super stream with n partitions.

    Retention is whichever of `max_age_seconds` and `max_bytes` (per partition) is reached first; it drops whole
    segments of `segment_bytes`.
    """

    name: str
    partitions: int = 0
    max_age_seconds: int = 7 * 24 * 3600
    max_bytes: int = 5 * 1024**3
    segment_bytes: int = 100 * 1024**2


class Owner(Protocol):
    """The engine's side of a subscription. Neither method may raise; the log waits for both."""

    async def activate(self, partition: Partition) -> int:
        """This process now reads the partition (also after each reconnect): finish the work of a former activation,
        then answer the offset to read from. Called anew whenever delivery starts anew."""
        ...

    async def deactivate(self, partition: Partition) -> None:
        """Another process is about to read the partition: stop, finish what is in flight and commit, then return."""
        ...


class Subscription(Protocol):
    """Reading one partition as a member of a group in which one member is active at a time."""

    partition: Partition

    async def ready(self) -> None:
        """Return as soon as at least one record can be taken. Cancel-safe."""
        ...

    def take(self, limit: int) -> list[Record]:
        """Up to `limit` records in rising order, none if there is none; nothing from before the last activation."""
        ...

    async def restart(self) -> None:
        """Drop what is buffered and subscribe anew; the owner is activated again and names the position."""
        ...

    async def close(self) -> None:
        """Stop reading and give the partition up. Bounded in time. The owner is not called any more."""
        ...


class Publisher(Protocol):
    """Writing to one partition under one name; calls are served one after another."""

    async def publish(self, messages: Sequence[bytes], ids: Sequence[int] | None = None) -> None:
        """Return when every message is confirmed.

        With a named publisher `ids` are required and rise strictly, also over calls; what is at or below the highest
        id stored under the name is dropped and counts as confirmed; the publisher itself resends after a lost
        connection, for as long as it takes. Without a name nothing is resent: `Unconfirmed` is raised when any
        confirm is missing. A message above the size limit raises ValueError before anything is sent.
        """
        ...

    async def close(self) -> None:
        """Let go of the connection. Bounded in time; nothing is pending between calls."""
        ...


class Log(Protocol):
    """A set of streams. Methods raise `LogError` (try again) or `LogRefused` (a person must act)."""

    @property
    def connected(self) -> bool:
        """False while a connection that is in use is known to be down."""
        ...

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def declare(self, spec: StreamSpec) -> None:
        """Create the stream if it is missing; raise `LogRefused` when it exists with another number of partitions."""
        ...

    async def partitions(self, stream: str) -> list[Partition]:
        """The partitions in order; one with index 0 for a plain stream. `StreamMissing` if there is no such stream."""
        ...

    async def bounds(self, partition: Partition) -> Bounds:
        """Exact bounds, at the time of asking."""
        ...

    async def written_at(self, partition: Partition, offset: int) -> int | None:
        """When the first record at or after `offset` was written (ms since 1970, of its chunk), None if none was."""
        ...

    def read(self, partition: Partition, first: int, end: int) -> AsyncIterator[list[Record]]:
        """The records from `first` on and below `end`, in pages, as a member of no group: nobody else is disturbed.

        `end` must not lie beyond the end of the partition. What retention has dropped is left out without a word.
        """
        ...

    async def subscribe(self, partition: Partition, group: str, owner: Owner) -> Subscription:
        """Join the group on this partition. Reconnects by itself; each time the owner is activated anew."""
        ...

    async def publisher(self, partition: Partition, name: str | None = None) -> Publisher:
        """A publisher; one live publisher per (name, partition) in a process."""
        ...


MAX_MESSAGE_BYTES = 1_000_000
"""The largest encoded message: below the broker's frame limit of 1 MiB with room for the frame's own fields."""


def route(key: str, partitions: int) -> int:
    """The partition of a key: CRC-32 (IEEE) of its UTF-8 bytes modulo the number of partitions.

    Fixed and our own, so that a producer in any language can do the same; rstream's hash route differs from that of
    other clients.
    """
    return zlib.crc32(key.encode()) % partitions
