"""Filters: read from what people type, written into links, and nothing else gets through."""

from datetime import UTC, date, datetime

import pytest

from processors.admin.filters import BadFilter, Filter


def test_filter_survives_its_own_link() -> None:
    """What a form says, the next page says as well."""
    fields = {
        "state": "failed",
        "name": "a.b",
        "since": "2026-11-30",
        "until": "2026-12-01",
        "q": "rep-1 & x",
        "before": "7",
    }
    wanted = Filter.read(fields)
    assert wanted.fields() == fields
    assert wanted.query() == ("?state=failed&name=a.b&since=2026-11-30&until=2026-12-01&q=rep-1+%26+x&before=7")


def test_no_filter_is_no_query() -> None:
    """Empty fields, as a form sends them, say nothing."""
    wanted = Filter.read({"state": "", "name": "", "since": "", "until": "", "q": "  ", "before": ""})
    assert wanted == Filter()
    assert (wanted.query(), wanted.narrowed) == ("", False)


def test_days_are_those_of_brasilia() -> None:
    """Midnight there is three in the morning in UTC; the last day counts whole."""
    wanted = Filter.read({"since": "2026-12-01", "until": "2026-12-01"})
    assert wanted.begins == datetime(2026, 12, 1, 3, tzinfo=UTC)
    assert wanted.ends == datetime(2026, 12, 2, 3, tzinfo=UTC)
    assert Filter.read({"since": "2026-12-01"}).since == date(2026, 12, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"state": "anything"},
        {"since": "01/12/2026"},
        {"since": "0001-01-01"},
        {"until": "9999-12-31"},
        {"since": "2026-12-02", "until": "2026-12-01"},
        {"batch": "zz"},
        {"batch": "abc"},
        {"batch": "%" * 5},
        {"q": "x" * 101},
        {"q": "\0"},
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(fields: dict[str, str]) -> None:
    """Not silently ignored: the list would show more than was asked for, and a retry of all would take more."""
    with pytest.raises(BadFilter):
        Filter.read(fields)


@pytest.mark.parametrize("before", ["x", "-1", "9" * 30, "1.5"])
def test_page_that_is_none_is_the_first(before: str) -> None:
    """A link that somebody has cut."""
    assert Filter.read({"before": before}).before is None
