"""Dead letters as messages, for people, alerts and other programs: a `relay.Source` of the table dead_letters.

At least once each, under the letter's id: readers drop repeats by it. A relay that dies between publishing and the mark
publishes again once its reservation is over. Not here: laying a letter, and trying again what it is about.
"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import orjson

from streams.database import Dialect
from streams.log import MAX_MESSAGE_BYTES
from streams.message import Message
from streams.processor import Limits
from streams.sql import Row, Sql, later, now, recordset

TYPE, VERSION = "dead_letter", 1

BATCH = 20
"""So many letters at once: each may hold the bytes of the largest record."""

ENVELOPE_BYTES = 2_000
"""Room for the properties of a message and for what JSON puts around the fields."""

TEXT_CHARACTERS = 10_000
"""An error, a key or a name is cut here, so that most of a message is left for the bytes."""


@dataclass(frozen=True, slots=True)
class DeadLetterTail:
    """To a plain stream that nobody of ours reads."""

    stream: str
    reader: str = ""
    wakes_on: str = "dead_letters"

    def due(self, limits: Limits, dialect: Dialect) -> "DueLetters":
        """Those not published yet."""
        return DueLetters(limits, dialect)

    def message(self, row: Row) -> Message:
        """See `letter_message`."""
        return letter_message(row)


class DueLetters:
    """See `relay.Due`. A letter is due until it was confirmed once; `reserve` repeats as well."""

    batch = BATCH
    confirms = True

    def __init__(self, limits: Limits, dialect: Dialect) -> None:
        text = "queued_until::text" if dialect == "postgresql" else "queued_until"
        skip = "FOR UPDATE SKIP LOCKED" if dialect == "postgresql" else ""
        queued = "x.queued::timestamptz" if dialect == "postgresql" else "x.queued"
        marks = recordset(dialect, "$1", "x", {"row_id": "bigint", "queued": "text"})
        self._reserve = f"""
            UPDATE dead_letters SET queued_until = {later(dialect, str(limits.visibility))}
            WHERE id IN (
                SELECT id FROM dead_letters
                WHERE published_at IS NULL AND (queued_until IS NULL OR queued_until <= {now(dialect)})
                ORDER BY id LIMIT $1 {skip})
            RETURNING {", ".join(_COLUMNS)}, NULL AS row_key, {text} AS queued_until"""
        self._release = f"""
            UPDATE dead_letters AS d SET queued_until = NULL
            FROM {marks} WHERE d.id = x.row_id AND d.queued_until = {queued}"""
        self._confirm = f"""
            UPDATE dead_letters AS d SET queued_until = NULL, published_at = {now(dialect)}
            FROM {marks} WHERE d.id = x.row_id"""

    async def reserve(self, sql: Sql, limit: int) -> list[Row]:
        return sorted(await sql.fetch(self._reserve, limit), key=lambda row: row["id"])

    async def expired(self, sql: Sql, limit: int) -> list[Row]:  # noqa: ARG002 - of the Protocol
        return []

    async def repeat(self, sql: Sql, ids: Sequence[int]) -> list[Row]:  # noqa: ARG002 - of the Protocol
        return []

    async def release(self, sql: Sql, rows: Sequence[Row]) -> None:
        await sql.fetch(self._release, _marks(rows))

    async def confirm(self, sql: Sql, rows: Sequence[Row]) -> None:
        await sql.fetch(self._confirm, _marks(rows))


_COLUMNS = (
    *("id", "processor", "source_stream", "source_partition", "source_offset", "item_index", "batch_id"),
    *("message_key", "table_name", "row_id", "claim_no", "reason", "error", "attempts", "body"),
    *("first_at", "created_at", "redriven_from"),
)


def _marks(rows: Sequence[Row]) -> str:
    return orjson.dumps([{"row_id": row["id"], "queued": str(row["queued_until"])} for row in rows]).decode()


# ---- the message


def letter_message(row: Row) -> Message:
    """One dead letter as a message of at most MAX_MESSAGE_BYTES: its own id, two codes as headers, the rest as JSON.

    `body` has the original bytes in base64 (null for a letter of a row), as many of them from the beginning as fit;
    `body_bytes` says how many there were, `body_cut` whether some are missing.
    """
    fields = {name: _cut(row[column]) for name, column in _FIELDS.items()}
    last_at = _time(row["created_at"])
    # Laravel's columns have whole seconds, rounded: a row may have been made half a second from now
    fields |= {"first_at": min(_time(row["first_at"] or row["created_at"]), last_at), "last_at": last_at}
    original: bytes | None = row["body"]
    room = (MAX_MESSAGE_BYTES - ENVELOPE_BYTES - len(orjson.dumps(fields))) // 4 * 3
    fields |= {
        "body": None if original is None else b64encode(original[:room]).decode(),
        "body_bytes": None if original is None else len(original),
        "body_cut": original is not None and len(original) > room,
    }
    headers = {"processor": str(_cut(row["processor"], 200)), "reason": str(_cut(row["reason"], 200))}
    return Message(str(row["id"]), TYPE, VERSION, 1, orjson.dumps(fields), headers)


_FIELDS = {
    "id": "id",
    "processor": "processor",
    "stream": "source_stream",
    "partition": "source_partition",
    "offset": "source_offset",
    "batch": "batch_id",
    "index": "item_index",
    "key": "message_key",
    "table": "table_name",
    "row": "row_id",
    "claim_no": "claim_no",
    "reason": "reason",
    "error": "error",
    "attempts": "attempts",
    "redriven_from": "redriven_from",
}


def _cut(value: object, characters: int = TEXT_CHARACTERS) -> object:
    return value[:characters] if isinstance(value, str) else value


def _time(at: datetime | str) -> str:
    """ISO 8601 in UTC, whichever database it comes from."""
    at = datetime.fromisoformat(at) if isinstance(at, str) else at
    return (at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)).isoformat(timespec="milliseconds")
