"""Where a processor is to read on: found and checked, forecast, and written; running processes notice by themselves.

Only the commands' logic; what a new epoch does to a running processor is `streams.assignment`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy.ext.asyncio import AsyncEngine

from processors._audit import audit_position
from processors._forecast import Forecast, NewKeys, Pointer, RowForecast
from streams import offsets
from streams.database import dialect, driver_connection
from streams.errors import StreamsError
from streams.log import Bounds, Log, Partition
from streams.sql import Sql, sql


class NoSuchPlace(StreamsError):
    """The partition or the offset is not there; the text says what is."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where to read on, in one of four ways: an offset, the first record since a time, the first record, or the end.

    `clamp` takes the nearest record that is there for one that is not; else that is refused.
    """

    offset: int | None = None
    since: datetime | None = None
    first: bool = False
    next: bool = False
    clamp: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """One partition: read on at `to`; `was` is the saved offset (None: it never started). The stream ends at `end`."""

    partition: Partition
    was: int | None
    to: int
    passed: int
    """How many records nobody has read would never be read."""
    end: int
    paused: bool = False

    @property
    def records(self) -> int:
        """How many there are to read then."""
        return self.end - self.to


# ---- finding


async def find(
    engine: AsyncEngine, log: Log, processor: str, stream: str, place: Place, only: int | None
) -> list[Move]:
    """The moves of all partitions, or of the one with index `only`. Raises NoSuchPlace, and what a log raises."""
    partitions = await log.partitions(stream)
    if only is not None and only not in range(len(partitions)):
        known = "partition 0 only" if len(partitions) == 1 else f"partitions 0 to {len(partitions) - 1}"
        raise NoSuchPlace(f"{stream} has no partition {only}: it has {known}")
    chosen = partitions if only is None else [partitions[only]]
    async with driver_connection(engine) as connection:
        database = sql(connection, dialect(engine))
        return [await _move(database, log, processor, partition, place) for partition in chosen]


async def _move(database: Sql, log: Log, processor: str, partition: Partition, place: Place) -> Move:
    bounds = await log.bounds(partition)
    saved = await offsets.load(database, processor, partition)
    to = await resolve(log, partition, bounds, place)
    # a halted position says nothing about what was read of the stream as it is now
    seen = saved.next_offset if saved is not None and not saved.halted_reason else bounds.first
    passed = max(0, to - max(seen, bounds.first))
    was = saved.next_offset if saved is not None else None
    return Move(partition, was, to, passed, bounds.next, saved is not None and saved.paused)


async def resolve(log: Log, partition: Partition, bounds: Bounds, place: Place) -> int:
    """The offset of a place in a partition with these bounds. Raises NoSuchPlace."""
    if place.first:
        return bounds.first
    if place.next:
        return bounds.next
    if place.since is not None:
        return await _since(log, partition, bounds, place.since, place.clamp)
    return _checked(partition, bounds, place.offset or 0, place.clamp)


def _checked(partition: Partition, bounds: Bounds, offset: int, clamp: bool) -> int:
    if bounds.first <= offset <= bounds.next or clamp:
        return min(max(offset, bounds.first), bounds.next)
    if offset < bounds.first:
        raise NoSuchPlace(
            f"{partition.name} begins at {bounds.first}: retention has dropped what was before, and {offset} with it; "
            "say --first, or --clamp to take the nearest"
        )
    raise NoSuchPlace(
        f"{partition.name} ends at {bounds.next}, before {offset}; say --next, or --clamp to take the nearest"
    )


async def _since(log: Log, partition: Partition, bounds: Bounds, since: datetime, clamp: bool) -> int:
    """The first record written at or after a time. Times of records never go back, so halving finds it."""
    wanted_ms = since.timestamp() * 1000
    low, high = bounds.first, bounds.next
    while low < high:
        middle = (low + high) // 2
        written_ms = await log.written_at(partition, middle)
        if written_ms is None or written_ms >= wanted_ms:
            high = middle
        else:
            low = middle + 1
    if low == bounds.first > 0 and not clamp:
        raise NoSuchPlace(
            f"{partition.name} keeps nothing from before {since.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC: retention may "
            "have dropped records since then; say --first, or --clamp to take the oldest"
        )
    return low


# ---- forecast


@dataclass(frozen=True, slots=True)
class Outlook:
    """What would follow: so many records read, `dead` of which nobody can take, so many mails, so many requests."""

    records: int
    dead: int
    mails: int = 0
    requests: int = 0


async def forecast(engine: AsyncEngine, log: Log, moves: Sequence[Move], new_keys: NewKeys) -> Outlook:
    """Read what would be read, and look up whom it names."""
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        seen = Forecast(connection)
        for move in moves:
            async for page in log.read(move.partition, move.to, move.end):
                await seen.add(new_keys, [record.data for record in page])
    return Outlook(seen.records, seen.dead, seen.mails)


async def forecast_rows(engine: AsyncEngine, log: Log, moves: Sequence[Move], pointer: Pointer) -> Outlook:
    """Read what would be read, and look which of the rows it points at are due."""
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        seen = RowForecast(connection, pointer)
        for move in moves:
            async for page in log.read(move.partition, move.to, move.end):
                await seen.add(record.data for record in page)
    return Outlook(seen.records, seen.dead, requests=seen.due)


# ---- writing


async def replay(engine: AsyncEngine, processor: str, moves: Sequence[Move], by: str) -> None:
    """All partitions at once, and who did it."""
    async with driver_connection(engine) as connection:
        database = sql(connection, dialect(engine))
        async with database.transaction():
            for move in moves:
                await offsets.replay(database, processor, move.partition, move.to)
                old, new = {"next_offset": move.was}, {"next_offset": move.to, "passed": move.passed}
                await audit_position(database, "replay", processor, move.partition, old, new, by)


async def set_paused(engine: AsyncEngine, processor: str, paused: bool, reason: str | None, by: str) -> int:
    """Pause or resume every partition; answers how many there are, 0 when the processor has never run here."""
    event, new = "pause" if paused else "resume", {"paused": paused, "paused_reason": reason}
    async with driver_connection(engine) as connection:
        database = sql(connection, dialect(engine))
        async with database.transaction():
            rows = await database.fetch(
                "SELECT stream, partition, paused, paused_reason FROM processor_offsets WHERE processor = $1", processor
            )
            await database.fetch(
                "UPDATE processor_offsets SET paused = $1, paused_reason = $2 WHERE processor = $3",
                *(paused, reason, processor),
            )
            for row in rows:
                place = Partition(row["stream"], row["partition"], row["stream"])
                old = {"paused": bool(row["paused"]), "paused_reason": row["paused_reason"]}
                await audit_position(database, event, processor, place, old, new, by)
    return len(rows)
