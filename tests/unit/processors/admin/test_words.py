"""How times, numbers and the texts of others are written."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from processors.admin.words import MAX_SHOWN, ago, money, number, pretty, several, state_of, when

NOW = datetime(2026, 12, 1, 3, 46, 12, tzinfo=UTC)


def test_time_is_that_of_brasilia_and_names_utc() -> None:
    """So that a line of the log is found as well."""
    assert str(when(NOW)) == (
        '<time datetime="2026-12-01T03:46:12Z" title="2026-12-01 03:46:12 UTC">01/12/2026 00:46:12</time>'
    )
    assert str(when(None)) == "—"


@pytest.mark.parametrize(
    ("seconds", "says"), [(0, "há 0 s"), (59, "há 59 s"), (60, "há 1 min"), (7200, "há 2 h"), (200_000, "há 2 d")]
)
def test_age_is_told_in_one_unit(seconds: int, says: str) -> None:
    """Nobody reads 200000 s."""
    assert ago(NOW - timedelta(seconds=seconds), NOW) == says


def test_numbers_are_written_as_in_brazil() -> None:
    """Dots between thousands, a comma before cents."""
    assert (number(1_234_567), number(None)) == ("1.234.567", "—")
    assert money(Decimal("1234567.80")) == "R$ 1.234.567,80"
    assert (several(1, "evento", "eventos"), several(0, "evento", "eventos")) == ("1 evento", "0 eventos")


def test_json_is_indented_and_its_numbers_keep_their_form() -> None:
    """10.10 is no 10.1, and an id of 20 digits no float."""
    shown = pretty('{"value": 10.10, "id": 12345678901234567890, "e": 1E+2, "nome": "Conceição", "list": [1]}')
    assert '"value": 10.10' in shown
    assert '"id": 12345678901234567890' in shown
    assert "1E+2" in shown
    assert "Conceição" in shown
    assert shown.count("\n") > 5


@pytest.mark.parametrize(
    "text",
    [
        "HTTP 503",
        "",
        '"text"',
        "{",
        "NaN",
        "[" * 100_000,
        '{"a": NaN}',
        '{"a": 1, "a": 2}',
        "\ud800",
        '["\\ud800"]',
        "1" * 5000,
    ],
)
def test_any_other_text_is_shown_as_it_is(text: str) -> None:
    """Nothing that a server answered makes the page fail."""
    assert pretty(text) == text


def test_bytes_and_long_texts_are_shown_too() -> None:
    """What is no UTF-8 is marked; what is endless is cut, and the page says so."""
    assert pretty(b"\xff{") == "\ufffd{"
    assert pretty(None) == ""
    long = pretty("x" * (MAX_SHOWN + 1))
    assert long.startswith("x" * MAX_SHOWN)
    assert "cortado" in long


def test_state_is_told_from_columns() -> None:
    """What a person calls it."""
    later, before = NOW + timedelta(seconds=1), NOW - timedelta(seconds=1)
    assert state_of("pending", False, None, NOW) == "pending"
    assert state_of("pending", False, later, NOW) == "in flight"
    assert state_of("pending", False, before, NOW) == "pending"
    assert state_of("sent", False, None, NOW) == "sent"
    assert state_of("failed", False, None, NOW) == "failed"
    assert state_of("failed", True, None, NOW) == "held"
    assert state_of(None, False, None, NOW) == "unknown"
