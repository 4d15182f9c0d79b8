"""What `afluente status` shows: how far each processor is, and what became of each batch. It changes nothing.

Everything is counted from rows at the time of asking; there are no counters that could drift. The ends of the streams
are asked of the log, or are those last seen by the processors when the log does not answer.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import RowMapping, bindparam, func, or_, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from models.tables import EmailDispatch, ImportBatch, OutboxEvent, ProcessorOffset, RepaymentRequestRow
from models.times import UtcDateTime, utc_now
from processors._redrive import TABLES
from streams.database import dialect, driver_connection
from streams.errors import LogError, LogRefused, StreamMissing
from streams.log import Log, Partition
from streams.redrive import Filter, Letters
from streams.sql import sql


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """How far one processor is in one partition. Seconds are the age of the oldest record that it has not passed.

    None: not known, because it never started here or the log did not answer. The offset is the next one to be read.
    """

    processor: str
    stream: str
    partition: int
    offset: int | None
    end: int | None
    lag_records: int | None
    lag_seconds: float | None
    paused: bool
    paused_reason: str | None
    halted_reason: str | None


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """What became of the registrations of one import: total = sent + waiting + failed + rejected + duplicate.

    `waiting` are its pending rows and what has been received of it but has no row yet. `held` are among the failed.
    """

    batch_id: str
    total: int
    sent: int
    waiting: int
    failed: int
    rejected: int
    duplicate: int
    held: int
    times_received: int
    received_at: datetime

    @property
    def complete(self) -> bool:
        """Nothing of it waits any more."""
        return not self.waiting

    @property
    def adds_up(self) -> bool:
        """False would mean that a registration is counted twice."""
        return self.total == self.sent + self.waiting + self.failed + self.rejected + self.duplicate


@dataclass(frozen=True, slots=True)
class Status:
    """The whole answer. `in_doubt`: mails that may have arrived twice, or whose outcome is not known at the moment.
    `dead_letters`: the open ones, by reason.
    """

    processors: Sequence[PartitionStatus]
    batches: Sequence[BatchStatus]
    rows: Mapping[str, int]
    events: Mapping[str, int]
    requests: Mapping[str, int]
    in_doubt: int
    held: int
    dead_letters: Mapping[str, int]
    log_away: str | None


async def status(engine: AsyncEngine, source: Log, readers: Mapping[str, str], batches: int) -> Status:
    """Look once. `source` is not opened yet; `readers` maps processors to the stream each reads; the newest batches."""
    ends, away = await _ends(source, sorted(set(readers.values())))
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")  # a look must not wait for writers on SQLite
        saved = await _saved(connection)
        in_doubt, held = await _doubts(connection)
        rows = await _count(connection, EmailDispatch.status)
        events = await _count(connection, OutboxEvent.status)
        requests = await _count(connection, RepaymentRequestRow.status)
        found = await _batches(connection, batches)
    dead = await _open_letters(engine)
    processors = [
        await _partition_status(source if away is None else None, processor, partition, saved, ends)
        for processor, partition in _places(readers, ends, saved)
    ]
    return Status(processors, found, rows, events, requests, in_doubt, held, dead, away)


# ---- processors

Place = tuple[str, str, int]
"""Processor, stream, partition."""


async def _ends(source: Log, streams: Sequence[str]) -> tuple[dict[Partition, tuple[int, int]], str | None]:
    """First and next offset of every partition, and why there are none when the log does not answer."""
    ends: dict[Partition, tuple[int, int]] = {}
    try:
        await source.open()
        for stream in streams:
            try:
                partitions = await source.partitions(stream)
            except StreamMissing:  # nobody has started yet
                continue
            for partition in partitions:
                ends[partition] = await source.bounds(partition)
    except (LogError, LogRefused) as error:
        return {}, str(error)
    return ends, None


async def _saved(connection: AsyncConnection) -> dict[Place, ProcessorOffset]:
    table = ProcessorOffset.__table__  # type: ignore[attr-defined]
    rows = (await connection.execute(select(table))).mappings()
    offsets = [ProcessorOffset(**row) for row in rows]
    return {(row.processor, row.stream, row.partition): row for row in offsets}


def _places(
    readers: Mapping[str, str], ends: Mapping[Partition, object], saved: Mapping[Place, ProcessorOffset]
) -> list[tuple[str, Partition]]:
    """Every partition that a processor reads or has read, in the order of the processors."""
    places = {(name, p.stream, p.index): p for name, stream in readers.items() for p in ends if p.stream == stream}
    for processor, stream, index in saved:
        places.setdefault((processor, stream, index), Partition(stream, index, f"{stream}-{index}"))
    order = list(readers)
    known = sorted(places, key=lambda p: (order.index(p[0]) if p[0] in order else len(order), *p))
    return [(place[0], places[place]) for place in known]


async def _partition_status(
    source: Log | None,
    processor: str,
    partition: Partition,
    saved: Mapping[Place, ProcessorOffset],
    ends: Mapping[Partition, tuple[int, int]],
) -> PartitionStatus:
    row = saved.get((processor, partition.stream, partition.index))
    first, end = ends.get(partition, (None, row.end_offset if row else None))
    offset = row.next_offset if row else None
    unread_from = offset if offset is not None else first
    lag = max(end - unread_from, 0) if end is not None and unread_from is not None else None
    return PartitionStatus(
        processor,
        partition.stream,
        partition.index,
        offset,
        end,
        lag,
        await _age(source if partition in ends else None, partition, unread_from, lag),
        bool(row and row.paused),
        row.paused_reason if row else None,
        row.halted_reason if row else None,
    )


async def _age(source: Log | None, partition: Partition, offset: int | None, lag: int | None) -> float | None:
    """Seconds since the oldest unread record was written."""
    if lag == 0:
        return 0.0
    if source is None or offset is None:
        return None
    written_ms = await source.written_at(partition, offset)
    return max(time.time() - written_ms / 1000, 0.0) if written_ms is not None else None


# ---- rows


async def _count(connection: AsyncConnection, column: object) -> dict[str, int]:
    counted = await connection.execute(select(column, func.count()).group_by(column))  # type: ignore[call-overload]
    return {name or "unknown": number for name, number in sorted(counted.all(), key=str)}


async def _open_letters(engine: AsyncEngine) -> dict[str, int]:
    """Those that still need somebody, by reason: neither redriven nor retried since."""
    found: Counter[str] = Counter()
    async with driver_connection(engine) as connection:
        for row in await Letters(sql(connection, dialect(engine)), TABLES).count(Filter()):
            found[row["reason"]] += row["letters"]
    return dict(sorted(found.items()))


async def _doubts(connection: AsyncConnection) -> tuple[int, int]:
    table = EmailDispatch.__table__.c  # type: ignore[attr-defined]
    lapsed = (table.status == "pending") & (table.lease_until <= utc_now())
    in_doubt = await connection.scalar(select(func.count()).where(or_(table.doubts > 0, lapsed)))
    held = await connection.scalar(select(func.count()).where(table.held))
    return in_doubt or 0, held or 0


_BATCHES = (
    text("""
WITH shown AS (SELECT * FROM import_batches WHERE batch_id IN :ids),
    mails AS (
        SELECT batch_id, batch_index, status, held FROM email_dispatches
        WHERE batch_id IN (SELECT batch_id FROM shown)),
    rejects AS (
        SELECT batch_id, item_index FROM dead_letters WHERE row_id IS NULL AND batch_id IN (SELECT batch_id FROM shown)
        EXCEPT SELECT batch_id, batch_index FROM mails),
    repeats AS (
        SELECT batch_id, item_index FROM batch_duplicates WHERE batch_id IN (SELECT batch_id FROM shown)
        EXCEPT SELECT batch_id, batch_index FROM mails
        EXCEPT SELECT batch_id, item_index FROM rejects),
    outcomes AS (
        SELECT batch_id, CASE WHEN status IN ('sent', 'failed') THEN status ELSE 'pending' END AS outcome,
            CASE WHEN held THEN 1 ELSE 0 END AS held FROM mails
        UNION ALL SELECT batch_id, 'rejected', 0 FROM rejects
        UNION ALL SELECT batch_id, 'duplicate', 0 FROM repeats)
SELECT s.batch_id, s.total, s.times_received, s.created_at,
    coalesce(sum(CASE WHEN o.outcome = 'sent' THEN 1 END), 0) AS sent,
    coalesce(sum(CASE WHEN o.outcome = 'pending' THEN 1 END), 0) AS pending,
    coalesce(sum(CASE WHEN o.outcome = 'failed' THEN 1 END), 0) AS failed,
    coalesce(sum(CASE WHEN o.outcome = 'rejected' THEN 1 END), 0) AS rejected,
    coalesce(sum(CASE WHEN o.outcome = 'duplicate' THEN 1 END), 0) AS duplicate,
    coalesce(sum(o.held), 0) AS held
FROM shown AS s LEFT JOIN outcomes AS o ON o.batch_id = s.batch_id
GROUP BY s.batch_id, s.total, s.times_received, s.created_at, s.updated_at
ORDER BY s.updated_at DESC, s.batch_id
""")
    .columns(created_at=UtcDateTime())
    .bindparams(bindparam("ids", expanding=True))
)
"""One statement, so that all numbers are of the same moment. An item that has a row is counted by its row alone."""


async def _batches(connection: AsyncConnection, batches: int) -> list[BatchStatus]:
    batch = ImportBatch.__table__.c  # type: ignore[attr-defined]
    newest = select(batch.batch_id).order_by(batch.updated_at.desc(), batch.batch_id).limit(batches)
    return await batches_of(connection, (await connection.scalars(newest)).all())


async def batches_of(connection: AsyncConnection, ids: Sequence[str]) -> list[BatchStatus]:
    """What became of these batches, the last one touched first."""
    if not ids:  # PostgreSQL finds no type for an empty list
        return []
    return [_batch(row) for row in (await connection.execute(_BATCHES, {"ids": list(ids)})).mappings()]


def _batch(row: RowMapping) -> BatchStatus:
    numbers = {name: int(row[name]) for name in _NUMBERS}
    with_row = sum(numbers[name] for name in ("sent", "failed", "rejected", "duplicate")) + row["pending"]
    waiting = row["pending"] + max(numbers["total"] - with_row, 0)
    return BatchStatus(batch_id=row["batch_id"], waiting=waiting, received_at=row["created_at"], **numbers)


_NUMBERS = ("total", "sent", "failed", "rejected", "duplicate", "held", "times_received")
