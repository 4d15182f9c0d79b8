"""Rows of the two tables that people retry: found by a filter, page by page, and one of them with its history.

A page is found by the id before it and never by counting, so that a table of millions is as quick as a small one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Text, and_, cast, false, func, or_, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from models.audits import Audit
from models.dead_letters import DeadLetter
from models.repayments import Payment, PaymentInstallment, Repayment
from models.times import utc_now
from processors._retry import EMAILS, EVENTS, REQUESTS, Kind
from processors.admin.filters import Filter
from processors.admin.words import state_of

PAGE = 50
MAX_NAMES = 200
AUDITS = 100

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class List:
    """A table as the page shows it: its address there, its columns, and how its free text is looked for."""

    path: str
    kind: Kind
    shown: Sequence[str]
    error: str

    @property
    def columns(self) -> Any:
        return self.kind.model.__table__.c  # type: ignore[union-attr]


_BOTH = ("id", "status", "held", "lease_until", "attempts", "created_at", "sent_at", "updated_at")
EVENT_LIST = List("events", EVENTS, (*_BOTH, "event_name", "last_error"), "last_error")
EMAIL_LIST = List(
    "emails", EMAILS, (*_BOTH, "to", "subject", "batch_id", "batch_index", "error_message"), "error_message"
)
REQUEST_LIST = List("requests", REQUESTS, (*_BOTH, "reference", "original_payment_id", "last_error"), "last_error")
LISTS = {one.path: one for one in (EVENT_LIST, EMAIL_LIST, REQUEST_LIST)}


@dataclass(frozen=True, slots=True)
class Page:
    """Some rows, newest first, each with its `state`; `older` is where the next page begins, None at the end."""

    rows: Sequence[Row]
    older: int | None


async def find(connection: AsyncConnection, what: List, wanted: Filter, now: datetime) -> Page:
    """The newest rows that are meant."""
    conditions = meets(what, wanted)
    if wanted.before is not None:
        conditions.append(what.columns.id < wanted.before)
    return await _page(connection, what, conditions, now)


async def find_address(connection: AsyncConnection, address: str, now: datetime) -> Page:
    """The newest e-mails to one address, however its letters are written."""
    return await _page(connection, EMAIL_LIST, [func.lower(EMAIL_LIST.columns.to) == address.lower()], now)


async def _page(
    connection: AsyncConnection, what: List, conditions: Sequence[ColumnElement[bool]], now: datetime
) -> Page:
    columns = what.columns
    query = select(*(columns[name] for name in what.shown)).where(*conditions).order_by(columns.id.desc())
    found = (await connection.execute(query.limit(PAGE + 1))).mappings().all()
    rows = [{**row, "error": row[what.error], "state": _state(dict(row), now)} for row in found[:PAGE]]
    return Page(rows, rows[-1]["id"] if len(found) > PAGE else None)


async def count(connection: AsyncConnection, what: List, conditions: Sequence[ColumnElement[bool]]) -> int:
    """How many meet the conditions."""
    query = select(func.count()).select_from(what.kind.model).where(*conditions)
    return int((await connection.execute(query)).scalar_one())


def meets(what: List, wanted: Filter) -> list[ColumnElement[bool]]:
    """The filter as conditions, but for its page."""
    columns = what.columns
    conditions: list[ColumnElement[bool]] = []
    if wanted.state:
        conditions.append(is_in(what, wanted.state))
    if wanted.name and "event_name" in columns:
        conditions.append(columns.event_name == wanted.name)
    if wanted.batch and "batch_id" in columns:
        whole = len(wanted.batch) == 64  # equality is what the index knows in every collation
        conditions.append(columns.batch_id == wanted.batch if whole else columns.batch_id.like(f"{wanted.batch}%"))
    if wanted.text:
        conditions.append(_finds(what, wanted.text))
    if (wanted.since or wanted.until) and not wanted.state and what is not EMAIL_LIST:
        # always true, and the only way to the index (status, created_at)
        conditions.append(columns.status.in_(("pending", "sent", "failed")))
    if wanted.begins is not None:
        conditions.append(columns.created_at >= wanted.begins)
    if wanted.ends is not None:
        conditions.append(columns.created_at < wanted.ends)
    return conditions


def is_in(what: List, state: str) -> ColumnElement[bool]:
    """The state of a row, as a condition."""
    c = what.columns
    flying = and_(c.lease_until.is_not(None), c.lease_until > utc_now())
    conditions: dict[str, ColumnElement[bool]] = {
        "pending": and_(c.status == "pending", or_(c.lease_until.is_(None), c.lease_until <= utc_now())),
        "in flight": and_(c.status == "pending", flying),
        "sent": c.status == "sent",
        "failed": and_(c.status == "failed", ~c.held),
        "held": and_(c.status == "failed", c.held),
        "unknown": c.status.is_(None),
    }
    return conditions[state]


def _finds(what: List, text: str) -> ColumnElement[bool]:
    """The row of this number; if there is none, what a payload or a reference says; of an e-mail key, id or error."""
    c = what.columns
    is_number = text.isascii() and text.isdigit() and len(text) < 19
    number = c.id == int(text) if is_number else false()
    if what is EMAIL_LIST:
        written = or_(c.idempotency_key == text.lower(), c.message_id == text, _says(c.error_message, text))
        return number if is_number else written
    says = _says(cast(c.payload, Text) if what is EVENT_LIST else c.reference, text)
    if not is_number:
        return says
    # asked once for the whole statement: no payload is read where there is such a row
    there = select(what.columns.id).where(number).correlate(None).exists()
    return or_(number, and_(~there, says))


def _says(column: ColumnElement[Any], text: str) -> ColumnElement[bool]:
    return column.contains(text, autoescape=True)


_NAMES = text("""
WITH RECURSIVE names (name) AS (
    SELECT min(event_name) FROM outbox_events
    UNION ALL
    SELECT (SELECT min(event_name) FROM outbox_events WHERE event_name > names.name) FROM names
    WHERE names.name IS NOT NULL)
SELECT name FROM names WHERE name IS NOT NULL LIMIT :most
""")
"""From one name to the next through the index; DISTINCT would read the whole table."""


async def event_names(connection: AsyncConnection) -> list[str]:
    """All names that events have."""
    return list((await connection.execute(_NAMES, {"most": MAX_NAMES})).scalars())


# ---- one row


@dataclass(frozen=True, slots=True)
class Detail:
    """A row with all its columns, and what happened to it, oldest first."""

    row: Row
    state: str
    audits: Sequence[Row]
    letters: Sequence[Row]


async def one(connection: AsyncConnection, what: List, row_id: int, now: datetime) -> Detail | None:
    """All that is known of one row. JSON columns are text, as the database has it."""
    columns = [cast(c, Text).label(c.name) if c.name in ("payload", "meta") else c for c in what.columns]
    found = (await connection.execute(select(*columns).where(what.columns.id == row_id))).mappings().first()
    if found is None:
        return None
    row = dict(found)
    return Detail(
        row, _state(row, now), await audits(connection, what, row_id), await letters(connection, what, row_id)
    )


async def audits(connection: AsyncConnection, what: List, row_id: int) -> Sequence[Row]:
    """Who changed what of it, the last hundred."""
    c = Audit.__table__.c  # type: ignore[attr-defined]
    mine = and_(c.auditable_type == what.kind.audited, c.auditable_id == row_id)
    query = select(c.id, c.event, c.old_values, c.new_values, c.tags, c.created_at).where(mine)
    rows = (await connection.execute(query.order_by(c.id.desc()).limit(AUDITS))).mappings().all()
    return [dict(row) for row in reversed(rows)]


async def letters(connection: AsyncConnection, what: List, row_id: int) -> Sequence[Row]:
    """Its dead letters."""
    c = DeadLetter.__table__.c  # type: ignore[attr-defined]
    table = what.kind.model.__tablename__
    query = select(c.id, c.reason, c.error, c.attempts, c.claim_no, c.created_at, c.redriven_at, c.redriven_by)
    query = query.where(c.table_name == str(table), c.row_id == row_id).order_by(c.id)
    return [dict(row) for row in (await connection.execute(query.limit(AUDITS))).mappings()]


def _state(row: Row, now: datetime) -> str:
    return state_of(row["status"], row["held"], row["lease_until"], now)


async def repayment(connection: AsyncConnection, request_id: int) -> Row | None:
    """What came of a request: the new payment and, if there was one, the payment that it replaces."""
    r = Repayment.__table__.c  # type: ignore[attr-defined]
    found = (await connection.execute(select(*r).where(r.request_id == request_id))).mappings().first()
    if found is None:
        return None
    return {
        **found,
        "payment": await _payment(connection, found["payment_id"]),
        "original": await _payment(connection, found["original_payment_id"]),
    }


async def _payment(connection: AsyncConnection, payment_id: int | None) -> Row | None:
    """A payment with its installments."""
    p, i = Payment.__table__.c, PaymentInstallment.__table__.c  # type: ignore[attr-defined]
    found = (await connection.execute(select(*p).where(p.id == payment_id))).mappings().first()
    if found is None:
        return None
    parts = await connection.execute(select(*i).where(i.payment_id == payment_id).order_by(i.number))
    return {**found, "installments": [dict(part) for part in parts.mappings()]}
