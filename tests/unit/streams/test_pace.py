"""The rate limit, with a clock that the test moves."""

from hypothesis import given
from hypothesis import strategies as st

from streams.pace import Pace

MOMENTS = st.lists(st.floats(0, 2), min_size=1, max_size=40)
"""Seconds between two askings."""


def test_everything_is_granted_when_there_is_no_rate() -> None:
    """And nobody has to wait."""
    pace = Pace(None)
    assert (pace.grant(500, 7.0), pace.wait(7.0)) == (500, 0.0)


def test_one_is_granted_when_the_first_asks_for_many() -> None:
    """The next one may start one step later."""
    pace = Pace(10)
    assert pace.grant(5, 100.0) == 1
    assert pace.grant(5, 100.05) == 0
    assert abs(pace.wait(100.05) - 0.05) < 1e-9


@given(MOMENTS, st.integers(1, 20))
def test_no_more_are_granted_than_the_rate_allows_when_many_are_wanted_all_the_time(
    gaps: list[float], wanted: int
) -> None:
    """At most rate x elapsed + 1 since the first, however unevenly the askings come."""
    pace, now, granted = Pace(3), 1000.0, 0
    for gap in gaps:
        granted += pace.grant(wanted, now)
        assert granted <= 3 * (now - 1000.0) + 1 + 1e-6
        now += gap


def test_the_rate_is_reached_when_each_asking_is_a_little_late() -> None:
    """A loop that wakes up late loses nothing by it."""
    pace, now, granted = Pace(10), 0.0, 0
    while now < 10:
        granted += pace.grant(5, now)
        now += pace.wait(now) + 0.004
    assert granted >= 99
