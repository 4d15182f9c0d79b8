"""Failed rows tried again because a person wants it: many at once, each refused by name, and audited for whom.

Which row may be retried is `models/retrying.py`'s; here it is asked under the row's lock. Dead letters are
`_redrive.py`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import ColumnElement, Select, bindparam, func, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import load_only

from models.audits import DISPATCH_TYPE, EVENT_TYPE, REQUEST_TYPE
from models.retrying import Why
from models.tables import Audit, EmailDispatch, OutboxEvent, RepaymentRequestRow
from models.times import utc_now
from processors._audit import who

CHUNK = 500
"""Rows of one transaction."""
LOCK_SECONDS = 3
LOCK_NOT_AVAILABLE = "55P03"

Refusal = Why | Literal["is waiting already", "is locked by somebody", "does not exist"]


Retryable = OutboxEvent | EmailDispatch | RepaymentRequestRow


@dataclass(frozen=True, slots=True)
class Kind:
    """A table whose rows people retry, and its name in the audit."""

    model: type[Retryable]
    audited: str


EVENTS = Kind(OutboxEvent, EVENT_TYPE)
EMAILS = Kind(EmailDispatch, DISPATCH_TYPE)
REQUESTS = Kind(RepaymentRequestRow, REQUEST_TYPE)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows are meant, and for whom. By ids, or those failed that meet the conditions, the oldest first.

    `failed_only` refuses a row that waits for its turn anyway, which else begins its attempts anew. At most `limit`
    rows are retried.
    """

    kind: Kind
    by: str
    ids: Sequence[int] = ()
    conditions: Sequence[ColumnElement[bool]] = ()
    failed_only: bool = False
    limit: int | None = None


@dataclass(slots=True)
class Retried:
    """The rows that are pending again, and why the others are not."""

    done: list[int] = field(default_factory=list)
    refused: dict[int, Refusal] = field(default_factory=dict)


async def retry_rows(engine: AsyncEngine, wanted: Wanted) -> Retried:
    """Make them pending with all their attempts, in transactions of at most `CHUNK` rows."""
    sum_, after = Retried(), 0
    while wanted.limit is None or len(sum_.done) < wanted.limit:
        room = CHUNK if wanted.limit is None else min(CHUNK, wanted.limit - len(sum_.done))
        last = await _chunk(engine, wanted, after, room, sum_)
        if last is None:
            break
        after = last
    if wanted.ids:
        await _name_the_rest(engine, wanted, sum_)
    return sum_


async def _chunk(engine: AsyncEngine, wanted: Wanted, after: int, room: int, sum_: Retried) -> int | None:
    """The next ones by id in one transaction; the last id, None when there were none."""
    try:
        return await _transaction(engine, wanted, after, room, sum_, skip_locked=False)
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != LOCK_NOT_AVAILABLE:
            raise
    return await _transaction(engine, wanted, after, room, sum_, skip_locked=True)


async def _transaction(
    engine: AsyncEngine, wanted: Wanted, after: int, room: int, sum_: Retried, *, skip_locked: bool
) -> int | None:
    async with AsyncSession(engine) as session, session.begin():
        if engine.dialect.name == "postgresql":
            await session.execute(text(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'"))
        rows = (await session.scalars(_select(wanted, after, room).with_for_update(skip_locked=skip_locked))).all()
        now: datetime = (await session.scalars(select(utc_now()))).one()
        ids = [row.id for row in rows]
        refused = {row.id: why for row in rows if (why := _why_not(row, wanted, now)) is not None}
        changed = [row.id for row in rows if row.id not in refused and row.status == "failed"]
        for row in rows:
            if row.id not in refused:
                row.retry(now)
                row.updated_at = now
        await session.flush()
        await _audit(session, wanted, changed)
    sum_.refused |= refused
    sum_.done += [row_id for row_id in ids if row_id not in refused]
    return ids[-1] if ids else None


def _select(wanted: Wanted, after: int, room: int) -> Select[Any]:
    model = wanted.kind.model
    column = model.__table__.c  # type: ignore[union-attr]
    needed = load_only(model.id, model.status, model.held, model.lease_until, model.attempts)  # type: ignore[arg-type]
    rows = select(model).options(needed).where(column.id > after).order_by(column.id).limit(room)
    meant = column.id.in_(wanted.ids) if wanted.ids else column.status == "failed"
    return rows.where(meant, *wanted.conditions).execution_options(populate_existing=True)


def _why_not(row: Retryable, wanted: Wanted, now: datetime) -> Refusal | None:
    why = row.not_retryable(now)
    if why is None and wanted.failed_only and row.status != "failed":
        return "is waiting already"
    return why


async def _audit(session: AsyncSession, wanted: Wanted, ids: Sequence[int]) -> None:
    """The rows are ours until the commit, so the last audit of each is of our change; the trigger cannot know for whom.

    Only of rows that were failed: to one that was pending nothing was written.
    """
    if not ids:
        return
    audit = Audit.__table__.c  # type: ignore[attr-defined]
    last = (
        select(func.max(audit.id))
        .where(audit.auditable_type == wanted.kind.audited, audit.auditable_id.in_(bindparam("ids", expanding=True)))
        .group_by(audit.auditable_id)
    )
    change = update(Audit).where(audit.id.in_(last)).values(tags=who("retry", wanted.by))
    await session.execute(change, {"ids": list(ids)}, execution_options={"synchronize_session": False})


async def _name_the_rest(engine: AsyncEngine, wanted: Wanted, sum_: Retried) -> None:
    """Why nothing is said yet of some ids: they are locked, or there are none."""
    rest = set(wanted.ids) - set(sum_.done) - set(sum_.refused)
    if not rest:
        return
    column = wanted.kind.model.__table__.c  # type: ignore[union-attr]
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        there = set((await connection.scalars(select(column.id).where(column.id.in_(rest)))).all())
    for row_id in sorted(rest):
        sum_.refused[row_id] = "is locked by somebody" if row_id in there else "does not exist"
