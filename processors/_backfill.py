"""Tell the rows of the old code what the new columns mean: they were sent, and this is their key.

Part of the migration, and may be run again at any time: after the old code has stopped, for the rows it inserted last.
A row without `dispatched_at` is left alone, since nothing says that it was sent; so is every row that has a status.
"""

import json
from typing import Any, NamedTuple

from sqlalchemy import Connection, Text, bindparam, cast, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from models.dispatches import IMPORT_MAILABLE_TYPE
from models.keys import idempotency_key
from models.registration import MAILABLE
from models.tables import metadata

CHUNK = 1_000
"""Rows per transaction: locks for milliseconds, and few of them."""

TRIES = 3

dispatches = metadata.tables["email_dispatches"].c


class Backfilled(NamedTuple):
    """How many rows got a status, and how many of these a key."""

    rows: int
    keys: int


async def backfill(engine: AsyncEngine) -> Backfilled:
    """Give every row without status that was dispatched the status sent, sent_at and, where it can be computed, a key.

    Only rows of the import's mailable get a key; of equal keys the lowest id among the old code's rows keeps it. A row
    of the engine never loses its key. The old code's times are taken as UTC, Laravel's default. Writes no audit rows.
    """
    async with engine.connect() as connection:
        return await connection.run_sync(backfill_rows)


def backfill_rows(connection: Connection) -> Backfilled:
    """As `backfill`, on a connection without open transaction; each chunk commits its own."""
    last, rows, keys = 0, 0, 0
    while True:
        chunk = _chunk_with_retries(connection, last)
        if not chunk:
            return Backfilled(rows, keys)
        last = chunk[-1]["row_id"]
        rows += len(chunk)
        keys += sum(1 for row in chunk if row["key"])


def key_of(meta: str | None, to: str) -> str | None:
    """The key of an old row of the import, from `meta` as stored, or None when it tells too little. Never raises."""
    known = _parsed(meta)
    if not isinstance(known, dict):
        return None
    for address in (known.get("agent_email"), to):
        try:
            return idempotency_key(MAILABLE, known["opp_id"], known["registration"], address)  # type: ignore[arg-type]
        except (KeyError, ValueError, AttributeError, TypeError):
            continue
    return None


def _parsed(meta: str | None) -> object:
    """JSON, also JSON in a JSON string, which a cast applied twice makes."""
    value: object = meta
    for _ in range(2):
        if not isinstance(value, str):
            return value
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value


def _chunk_with_retries(connection: Connection, last: int) -> list[dict[str, Any]]:
    """The new code may take a key between our look and our write; then the second look sees it."""
    for left in reversed(range(TRIES)):
        try:
            with connection.begin():
                return _chunk(connection, last)
        except IntegrityError:
            if not left:
                raise
    raise AssertionError("unreachable")


def _chunk(connection: Connection, last: int) -> list[dict[str, Any]]:
    found = connection.execute(
        select(dispatches.id, dispatches.to, dispatches.mailable_type, cast(dispatches.meta, Text).label("meta"))
        .where(dispatches.id > last, dispatches.status.is_(None), dispatches.dispatched_at.is_not(None))
        .order_by(dispatches.id)
        .limit(CHUNK)
        .with_for_update()
    ).all()
    rows = [
        {"row_id": row.id, "key": key_of(row.meta, row.to) if row.mailable_type == IMPORT_MAILABLE_TYPE else None}
        for row in found
    ]
    if rows:
        _keep_first(connection, rows)
        # The session's zone is UTC, so a column without zone becomes the time it means.
        connection.execute(
            update(dispatches.id.table)
            .where(dispatches.id == bindparam("row_id"))
            .values(status="sent", sent_at=dispatches.dispatched_at, idempotency_key=bindparam("key")),
            rows,
        )
    return rows


def _keep_first(connection: Connection, rows: list[dict[str, Any]]) -> None:
    """Leave each key to the lowest id: in this chunk, and among rows of the old code that were given it before."""
    wanted: dict[str, int] = {}
    for row in rows:
        if row["key"]:
            wanted.setdefault(row["key"], row["row_id"])
    holders = connection.execute(
        select(
            dispatches.id,
            dispatches.idempotency_key,
            (dispatches.status == "sent").label("sent"),
            dispatches.claim_no,
        ).where(dispatches.idempotency_key.in_(wanted))
    ).all()
    give_up = []
    for holder in holders:
        if holder.sent and holder.claim_no == 0 and holder.id > wanted[holder.idempotency_key]:
            give_up.append(holder.id)
        else:
            wanted[holder.idempotency_key] = holder.id
    if give_up:
        connection.execute(update(dispatches.id.table).where(dispatches.id.in_(give_up)).values(idempotency_key=None))
    for row in rows:
        if row["key"] and wanted[row["key"]] != row["row_id"]:
            row["key"] = None
