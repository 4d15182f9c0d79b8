"""A dead letter is a row, written in the transaction of the failure. Here one is laid; people look at the table."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from streams.sql import Sql, now, storable


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One final failure. `reason` is a code, `error` a sentence; neither holds an address.

    Either of a row (`table_name`, `row_id`, `claim_no`), or of bytes that never became one (`body`; with `batch_id` and
    `item_index` for a single registration of a batch).
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


async def lay(sql: Sql, letters: Sequence[DeadLetter]) -> None:
    """Insert, once each: a replay, a redelivery or a paused former owner adds none (three partial unique indexes)."""
    if letters:
        await sql.many(_INSERT.format(now=now(sql.dialect)), [_values(letter) for letter in letters])


def _values(letter: DeadLetter) -> tuple[object, ...]:
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
        hashlib.sha256(letter.body).hexdigest() if letter.body is not None else None,
    )


_INSERT = """
INSERT INTO dead_letters (processor, source_stream, source_partition, source_offset, item_index, batch_id, message_key,
                          table_name, row_id, claim_no, reason, error, attempts, body, body_hash, created_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, {now})
ON CONFLICT DO NOTHING
"""
