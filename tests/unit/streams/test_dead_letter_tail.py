"""A dead letter as a message: always within the frame, and nobody is named in its properties."""

from base64 import b64decode
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import orjson
import pytest

from streams.dead_letter_tail import letter_message
from streams.log import MAX_MESSAGE_BYTES

AT = datetime(2026, 12, 1, 3, 4, 5, 678000, tzinfo=UTC)
ROW: dict[str, Any] = {
    "id": 7, "processor": "splitter", "source_stream": "imports", "source_partition": 0, "source_offset": 12,
    "item_index": None, "batch_id": None, "message_key": None, "table_name": None, "row_id": None, "claim_no": None,
    "reason": "not_json", "error": "the body is not JSON", "attempts": 0, "body": b"[{", "first_at": None,
    "created_at": AT, "redriven_from": None,
}  # fmt: skip


def fields(**changes: Any) -> dict[str, Any]:
    """The body of the message for ROW with these changes."""
    found: dict[str, Any] = orjson.loads(letter_message({**ROW, **changes}).body)
    return found


def test_everything_known_about_the_failure_is_in_the_body() -> None:
    """Who reads it needs no database."""
    assert fields() == {
        "id": 7, "processor": "splitter", "stream": "imports", "partition": 0, "offset": 12, "batch": None,
        "index": None, "key": None, "table": None, "row": None, "claim_no": None, "reason": "not_json",
        "error": "the body is not JSON", "attempts": 0, "redriven_from": None, "body": "W3s=", "body_bytes": 2,
        "body_cut": False, "first_at": "2026-12-01T03:04:05.678+00:00", "last_at": "2026-12-01T03:04:05.678+00:00",
    }  # fmt: skip


def test_properties_are_the_id_and_codes() -> None:
    """Properties are shown by every tool; they say what kind of failure it is, never whose."""
    message = letter_message(ROW)
    assert (message.id, message.type, message.version, message.attempt) == ("7", "dead_letter", 1, 1)
    assert message.headers == {"processor": "splitter", "reason": "not_json"}


@pytest.mark.parametrize("size", [700_000, 740_000, 746_000, 1_048_000, 5_000_000])
@pytest.mark.parametrize("error", ["e", "\x01" * 2_000_000, "é" * 2_000_000, "💥" * 2_000_000])
def test_message_fits_when_the_bytes_or_the_error_are_too_long(size: int, error: str) -> None:
    """As many of the first bytes as fit, and a flag when some are missing."""
    body = bytes(range(256)) * (size // 256)
    message = letter_message({**ROW, "body": body, "error": error, "message_key": error, "reason": error})

    assert len(message.encode()) <= MAX_MESSAGE_BYTES
    found = orjson.loads(message.body)
    kept = b64decode(found["body"])
    assert body.startswith(kept)
    assert (found["body_bytes"], found["body_cut"]) == (len(body), len(kept) < len(body))
    assert len(kept) > 500_000


def test_letter_of_a_row_has_no_bytes() -> None:
    """Its row has everything."""
    found = fields(body=None, table_name="email_dispatches", row_id=42, claim_no=3, attempts=3)
    assert (found["table"], found["row"], found["claim_no"], found["attempts"]) == ("email_dispatches", 42, 3, 3)
    assert (found["body"], found["body_bytes"], found["body_cut"]) == (None, None, False)


@pytest.mark.parametrize(
    "at",
    [AT, AT.replace(tzinfo=None), AT.astimezone(timezone(timedelta(hours=-3))), "2026-12-01 03:04:05.678",
     "2026-12-01 03:04:05.678000"],
)  # fmt: skip
def test_times_are_utc_however_the_database_tells_them(at: object) -> None:
    """PostgreSQL's drivers give datetimes, SQLite text."""
    found = fields(first_at=at, created_at=at)
    assert (found["first_at"], found["last_at"]) == ("2026-12-01T03:04:05.678+00:00",) * 2
