"""An event before it is written, and what its methods make of it."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import orjson
import pytest

from models.outbox import MAX_PAYLOAD_BYTES, InvalidEvent, OutboxEvent, add_event, encode
from models.retrying import NotRetried

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
NAME = "new_checkout.repayment_sync"


class Session:
    """Keeps what is added."""

    def __init__(self) -> None:
        self.added: list[Any] = []

    def add(self, instance: Any, /) -> None:
        self.added.append(instance)


def event(**values: Any) -> OutboxEvent:
    """An event as the database might have it."""
    return OutboxEvent(id=7, event_name=NAME, payload={"a": 1}, **values)


# ---- writing


def test_event_is_in_the_session_when_it_is_added() -> None:
    """Pending, untried, in the caller's transaction."""
    session = Session()
    added = add_event(session, NAME, {"repayment": {"reference": "r-1"}})
    assert session.added == [added]
    assert (added.event_name, added.status, added.attempts) == (NAME, "pending", 0)


@pytest.mark.parametrize("name", ["", "  ", None, 7, "a\nb", "x" * 201])
def test_name_is_refused_when_it_names_nothing(name: Any) -> None:
    """Empty, no text, with a line break, or endless."""
    with pytest.raises(InvalidEvent, match="name"):
        add_event(Session(), name, {"a": 1})


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        ({}, "empty"),
        (None, "object"),
        ([1], "object"),
        ("{}", "object"),
        ({"a": float("nan")}, "NaN"),
        ({"a": [{"b": float("-inf")}]}, "NaN"),
        ({"a": Decimal("NaN")}, "NaN"),
        ({"a": Decimal("1E+5000")}, "beyond"),
        ({1: "a"}, "keys"),
        ({"a": object()}, "object, which JSON does not have"),
        ({"a": b"x"}, "bytes"),
        ({"a": "x\0y"}, "NUL"),
        ({"a\0": 1}, "NUL"),
        ({"a": "\ud800"}, "cannot be written"),
        ({"a": "x" * MAX_PAYLOAD_BYTES}, "more than"),
    ],
)
def test_payload_is_refused_when_it_is_no_json_object_of_moderate_size(payload: Any, why: str) -> None:
    """Found where it is written, by the one who can mend it, and not by the receiver."""
    with pytest.raises(InvalidEvent, match=why):
        add_event(Session(), NAME, payload)


def test_payload_is_refused_when_it_is_nested_without_end() -> None:
    """An object that contains itself must not end the process."""
    payload: dict[str, Any] = {}
    payload["a"] = payload
    with pytest.raises(InvalidEvent, match="nested"):
        add_event(Session(), NAME, payload)


def test_numbers_keep_their_form_when_they_are_written() -> None:
    """Money and ids: no float in between, no 64-bit limit."""
    text = encode({"b": 1, "a": Decimal("10.10"), "id": 12345678901234567890123, "rate": Decimal("0.1000"), "f": 0.5})
    assert text == '{"b":1,"a":10.10,"id":12345678901234567890123,"rate":0.1000,"f":0.5}'


def test_text_stays_utf8_and_the_rest_as_it_is() -> None:
    """Portuguese text, booleans, null, lists."""
    payload = {"nome": "Conceição", "ok": True, "nada": None, "itens": [1, {"x": "é"}]}
    assert orjson.loads(encode(payload)) == payload


@pytest.mark.parametrize("context", ["", "00-abc-def-01", f"00-{'0' * 32}-{'1' * 16}-01"])
def test_trace_context_is_refused_when_it_is_malformed(context: str) -> None:
    """It becomes a header of a request."""
    with pytest.raises(InvalidEvent, match="traceparent"):
        add_event(Session(), NAME, {"a": 1}, traceparent=context)


# ---- transitions


def test_failures_are_failed_at_the_limit_and_wait_before_it() -> None:
    """The claim has counted the attempt; the failure only compares."""
    row = event(attempts=2, claim_no=2, lease_until=NOW)
    row.register_failure("HTTP 500", retry_at=NOW + timedelta(seconds=5))
    assert (row.status, row.attempts, row.last_error) == ("pending", 2, "HTTP 500")
    assert (row.next_attempt_at, row.lease_until) == (NOW + timedelta(seconds=5), None)
    row.attempts = 3
    row.register_failure("HTTP 502")
    assert (row.status, row.attempts, row.last_error, row.next_attempt_at) == ("failed", 3, "HTTP 502", None)


def test_event_is_sent_with_its_time_when_it_was_accepted() -> None:
    """A fact: the error of an earlier attempt goes, also a hold."""
    row = event(attempts=2, last_error="HTTP 500", held=True, status="failed")
    row.mark_sent(NOW)
    assert (row.status, row.sent_at, row.last_error, row.held) == ("sent", NOW, None, False)


def test_failed_event_is_pending_with_all_attempts_when_it_is_retried() -> None:
    """Pending, attempts 0, no error; claim_no is the engine's and stays."""
    row = event(status="failed", attempts=3, claim_no=3, last_error="HTTP 500")
    row.retry(NOW)
    assert (row.status, row.attempts, row.last_error, row.claim_no) == ("pending", 0, None, 3)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"status": "sent", "sent_at": NOW}, "was sent"),
        ({"status": "failed", "held": True}, "is held"),
        ({"status": "pending", "lease_until": NOW + timedelta(seconds=1)}, "is in flight"),
    ],
)
def test_retry_is_refused_by_name_when_it_could_send_twice(values: dict[str, Any], why: str) -> None:
    """Nothing of the row changes then."""
    row = event(attempts=1, last_error="HTTP 500", **values)
    with pytest.raises(NotRetried, match=f"event 7 {why}: not retried"):
        row.retry(NOW)
    assert (row.attempts, row.last_error) == (1, "HTTP 500")
