"""What last_error says, what it must not say, and how long a busy receiver is left alone."""

from datetime import UTC, datetime

import pytest

from processors._http import errors
from processors._http.answer import Answer
from processors._http.request import RequestDescription

NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)


def request(body: str = "{}") -> RequestDescription:
    """A request with a token."""
    return RequestDescription("POST", "https://a.example.com", {}, body.encode(), 3.0, secrets=("s3cret-token",))


def test_status_and_body_are_told() -> None:
    """What a person needs to act."""
    assert errors.refusal(Answer(500, '{"error": "boom"}')) == 'HTTP 500: {"error": "boom"}'


def test_location_is_told_when_the_answer_is_a_redirect() -> None:
    """Somebody has moved the receiver, and this is where to."""
    text = errors.refusal(Answer(302, "", location="https://other.example.com/v2"))
    assert text.startswith("HTTP 302 (Location: https://other.example.com/v2): redirects are not followed")


@pytest.mark.parametrize(
    ("status", "value", "seconds"),
    [
        (429, "30", 30.0),
        (429, "0", 0.0),
        (429, "86400", 900.0),
        (429, "9" * 400, 900.0),
        (429, " 7 ", 7.0),
        (429, "abc", 0.0),
        (429, "-5", 0.0),
        (429, "1.5", 0.0),
        (429, "", 0.0),
        (429, None, 0.0),
        (429, "Mon, 30 Nov 2026 12:00:40 GMT", 40.0),
        (429, "Mon, 30 Nov 2026 12:00:40 -0000", 40.0),
        (429, "Mon, 30 Nov 2026 11:00:00 GMT", 0.0),
        (429, "Tue, 01 Dec 2099 12:00:00 GMT", 900.0),
        (503, "30", 30.0),
        (500, "30", 0.0),
        (201, "30", 0.0),
    ],
)
def test_wait_is_what_the_receiver_asks_for_up_to_the_cap(status: int, value: str | None, seconds: float) -> None:
    """Receiver-controlled delay needs limits (O-36)."""
    assert errors.retry_after(Answer(status, "", retry_after=value), NOW) == seconds


@pytest.mark.parametrize(
    ("status", "fault"),
    [(500, "HTTP 500"), (503, "HTTP 503"), (401, "HTTP 401"), (429, "HTTP 429"), (400, None), (404, None), (422, None)],
)
def test_answers_that_all_events_would_get_count_for_the_breaker(status: int, fault: str | None) -> None:
    """400 and its like are about the event."""
    assert errors.fault(status) == fault


def test_no_secret_is_shown_when_the_answer_repeats_it() -> None:
    """Plain, or as a header."""
    text = errors.clean("HTTP 401: bad s3cret-token, Authorization: Bearer abcdefgh", request())
    assert "s3cret" not in text
    assert "abcdefgh" not in text


def test_nobody_is_named_when_the_answer_repeats_the_payload() -> None:
    """Receivers like to say what they could not read; references and amounts are not somebody's own."""
    payload = """{"customer": {"name": "Ana Exemplo", "cpf": "12345678909", "contacts": [{"email": "ana@example.com"}],
        "address": {"street": "Rua Inventada 7"}}, "repayment": {"reference": "ref-2026-1", "amount": 10.10}}"""
    text = errors.clean(
        "HTTP 422: Ana Exemplo (12345678909, ana@example.com, Rua Inventada 7) has no ref-2026-1", request(payload)
    )
    assert text == "HTTP 422: *** (***, ***, ***) has no ref-2026-1"


def test_the_rest_stays_when_values_are_too_short_to_be_looked_for() -> None:
    """A name of two letters is in every text; a body that is no JSON hides nothing."""
    assert errors.clean("HTTP 400: bad", request('{"name": "ba"}')) == "HTTP 400: bad"
    assert errors.clean("HTTP 400: bad", request("not json")) == "HTTP 400: bad"
