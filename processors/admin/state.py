"""How things stand: counts that indexes answer, positions, batches, dead letters. Queries only."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from models.batches import ImportBatch
from models.offsets import ProcessorOffset
from processors._redrive import TABLES
from processors._status import BatchStatus, batches_of
from processors.admin import rows
from processors.admin.looking import LOOK_SECONDS, TooSlow
from processors.admin.rows import LISTS, List
from streams.database import dialect, driver_connection
from streams.redrive import Filter, Letters
from streams.sql import sql

BATCHES = 20
LETTERS = 50
STALE = timedelta(minutes=2)
"""A processor looks at its stream every few seconds; one that has not for so long does not run."""


# ---- rows


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one table: what waits, what failed. How many were ever sent no index knows."""

    what: List
    states: Mapping[str, int]
    oldest: datetime | None
    """When the oldest row that waits was written."""


async def counts(connection: AsyncConnection, what: List) -> Counts:
    """Counted now."""
    states = {
        state: await rows.count(connection, what, [rows.is_in(what, state)])
        for state in ("pending", "in flight", "failed", "held")
    }
    c = what.columns
    oldest = (await connection.execute(select(func.min(c.created_at)).where(c.status == "pending"))).scalar_one()
    return Counts(what, states, oldest)


async def all_counts(connection: AsyncConnection) -> list[Counts]:
    """Of all tables that people retry."""
    return [await counts(connection, what) for what in LISTS.values()]


# ---- positions


@dataclass(frozen=True, slots=True)
class Position:
    """How far a processor is in a partition, as its row says; `lag` is what it has not passed of the end it saw."""

    row: ProcessorOffset
    lag: int | None
    stale: bool

    @property
    def trouble(self) -> str:
        """What a person should know, "" when all is well."""
        if self.row.halted_reason:
            return "parada"
        if self.row.paused:
            return "em pausa"
        return "sem notícias" if self.stale else ""


async def positions(connection: AsyncConnection, now: datetime) -> list[Position]:
    """All of them."""
    c = ProcessorOffset.__table__.c  # type: ignore[attr-defined]
    found = await connection.execute(select(*c).order_by(c.processor, c.stream, c.partition))
    return [_position(ProcessorOffset(**row), now) for row in found.mappings()]


def _position(row: ProcessorOffset, now: datetime) -> Position:
    lag = max(row.end_offset - row.next_offset, 0) if row.end_offset is not None else None
    return Position(row, lag, row.seen_at is None or row.seen_at < now - STALE)


# ---- batches


@dataclass(frozen=True, slots=True)
class Batches:
    """Some batches, the last one touched first; `older` says where the next page begins."""

    shown: Sequence[BatchStatus]
    older: str | None


async def batches(connection: AsyncConnection, prefix: str, after: str | None) -> Batches:
    """Those whose id begins so; after this id in the order."""
    c = ImportBatch.__table__.c  # type: ignore[attr-defined]
    query = select(c.batch_id).order_by(c.updated_at.desc(), c.batch_id.desc()).limit(BATCHES + 1)
    if prefix:
        query = query.where(c.batch_id.like(f"{prefix}%"))
    if after is not None:
        mark = select(c.updated_at).where(c.batch_id == after).scalar_subquery()
        query = query.where(tuple_(c.updated_at, c.batch_id) < tuple_(mark, after))
    ids = list((await connection.scalars(query)).all())
    shown = await batches_of(connection, ids[:BATCHES])
    return Batches(shown, ids[BATCHES - 1] if len(ids) > BATCHES else None)


# ---- dead letters


@dataclass(frozen=True, slots=True)
class Found:
    """Some dead letters, newest first, each with its `state`."""

    shown: Sequence[Mapping[str, Any]]
    older: int | None


async def letters(engine: AsyncEngine, *, open_only: bool, reason: str | None, before: int | None) -> Found:
    """The newest ones."""
    wanted = Filter(reason=reason, open_only=open_only, before=before)
    async with _looking(engine) as found:
        shown = [_timed(row) for row in await found.newest(wanted, LETTERS + 1)]
    return Found(shown[:LETTERS], shown[LETTERS - 1]["id"] if len(shown) > LETTERS else None)


async def open_letters(engine: AsyncEngine) -> list[Mapping[str, Any]]:
    """How many are open, by processor and reason."""
    async with _looking(engine) as found:
        return [dict(row) for row in await found.count(Filter())]


async def letter(engine: AsyncEngine, letter_id: int) -> tuple[Mapping[str, Any], bytes | None] | None:
    """One with its original bytes."""
    async with _looking(engine) as found:
        row = await found.one(letter_id)
        return (_timed(row), await found.body(letter_id)) if row is not None else None


@asynccontextmanager
async def _looking(engine: AsyncEngine) -> AsyncIterator[Letters]:
    """The statements of `afluente dead-letters`, bounded as every look is. Raises TooSlow."""
    try:
        async with asyncio.timeout(LOOK_SECONDS), driver_connection(engine) as connection:
            yield Letters(sql(connection, dialect(engine)), TABLES)
    except TimeoutError:
        raise TooSlow from None


def _timed(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """SQLite's driver hands out times as text."""

    def time(value: Any) -> Any:
        return datetime.fromisoformat(value).replace(tzinfo=UTC) if isinstance(value, str) else value

    return {name: time(value) if name.endswith("_at") else value for name, value in row.items()}
