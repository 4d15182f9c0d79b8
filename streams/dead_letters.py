"""A dead letter is a row, written in the transaction of the failure. Here one is laid; people look at the table."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from streams.sql import Sql, now, storable


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One final failure. `reason` is a code, `error` a sentence; neither holds an address.

    Either of a row (`table_name`, `row_id`, `claim_no`), or of bytes that never became one (`body`; with `batch_id` and
    `item_index` for a single registration of a batch). `first_at` is when the work began, as the driver gave it, None
    when that is now. `redriven_from` is the letter that was redriven and has come to this; for a whole record it is
    found by its bytes, which carry no name.
    """

    processor: str
    stream: str
    partition: int
    reason: str
    error: str
    offset: int | None = None
    item_index: int | None = None
    batch_id: str | None = None
    message_key: str | None = None
    table_name: str | None = None
    row_id: int | None = None
    claim_no: int | None = None
    attempts: int = 0
    body: bytes | None = None
    first_at: datetime | str | None = None
    redriven_from: int | None = None


async def lay(sql: Sql, letters: Sequence[DeadLetter]) -> None:
    """Insert, once each: a replay, a redelivery or a paused former owner adds none (three partial unique indexes)."""
    if letters:
        await sql.many(_INSERT.format(now=now(sql.dialect)), [_values(letter) for letter in letters])


def _values(letter: DeadLetter) -> tuple[object, ...]:
    body_hash = hashlib.sha256(letter.body).hexdigest() if letter.body is not None else None
    of_record = letter.row_id is None and letter.batch_id is None
    return (
        letter.processor,
        letter.stream,
        letter.partition,
        letter.offset,
        letter.item_index,
        letter.batch_id,
        letter.message_key,
        letter.table_name,
        letter.row_id,
        letter.claim_no,
        letter.reason,
        storable(letter.error),
        letter.attempts,
        letter.body,
        body_hash,
        _aware(letter.first_at),
        letter.redriven_from,
        body_hash if of_record else None,
    )


def _aware(at: datetime | str | None) -> datetime | str | None:
    """Columns of PostgreSQL without a zone hold UTC; SQLite's text is stored as it is."""
    return at.replace(tzinfo=UTC) if isinstance(at, datetime) and at.tzinfo is None else at


_INSERT = """
INSERT INTO dead_letters (processor, source_stream, source_partition, source_offset, item_index, batch_id, message_key,
                          table_name, row_id, claim_no, reason, error, attempts, body, body_hash, first_at,
                          redriven_from, created_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16,
    coalesce(CAST($17 AS bigint), (
        SELECT max(o.id) FROM dead_letters AS o
        WHERE o.body_hash = CAST($18 AS text) AND o.row_id IS NULL AND o.batch_id IS NULL
            AND o.processor = $1 AND o.source_stream = $2 AND o.redriven_by IS NOT NULL
            AND NOT EXISTS (SELECT 1 FROM dead_letters AS n WHERE n.body_hash = o.body_hash AND n.row_id IS NULL
                AND n.batch_id IS NULL AND n.redriven_from = o.id))), {now})
ON CONFLICT DO NOTHING
"""
