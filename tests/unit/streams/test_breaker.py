"""When a whole provider counts as away, and how it comes back."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.breaker import Breaker, BreakerPolicy, State

POLICY = BreakerPolicy(threshold=3, probe_seconds=5, probe_max_seconds=18)


def opened(now: float = 100.0) -> Breaker:
    """A breaker that has just opened."""
    breaker = Breaker(POLICY)
    for record in (1, 2, 3):
        breaker = breaker.failed(record, "connect", now)
    return breaker


@pytest.mark.parametrize(
    ("failures", "is_open"),
    [
        ([(1, "connect"), (2, "connect")], False),
        ([(1, "connect"), (2, "connect"), (3, "connect")], True),
        ([(1, "connect"), (1, "connect"), (1, "connect"), (2, "connect")], False),
        ([(1, "connect"), (2, "connect"), (3, "auth")], False),
        ([(1, "connect"), (2, "connect"), (3, "auth"), (4, "auth"), (5, "auth")], True),
        ([(1, "connect"), (2, "connect"), (3, None), (4, "connect"), (5, "connect")], False),
        ([(1, None), (2, None), (3, None), (4, None)], False),
        ([("a", "tls"), ("b", "tls"), ("c", "tls")], True),
    ],
)
def test_opens_when_enough_different_records_fail_alike(
    failures: list[tuple[int | str, str | None]], is_open: bool
) -> None:
    """The same fault, of different records, with nothing else between."""
    breaker = Breaker(POLICY)
    for record, fault in failures:
        breaker = breaker.failed(record, fault, now=0.0)
    assert breaker.is_open is is_open


def test_counts_anew_when_a_record_is_done() -> None:
    """One success shows that the provider is there."""
    breaker = Breaker(POLICY).failed(1, "connect", 0).failed(2, "connect", 0).succeeded()
    assert not breaker.failed(3, "connect", 0).failed(4, "connect", 0).is_open


def test_tail_of_what_was_in_flight_changes_nothing_while_open() -> None:
    """Only the probe closes it, and late failures do not delay the probe."""
    breaker = opened()
    assert breaker.failed(9, "connect", 200).failed(8, None, 200).succeeded() == breaker


def test_probe_is_due_after_the_first_wait_when_it_has_opened() -> None:
    """The opening says since when, why, and when to look."""
    breaker = opened(now=100)
    assert (breaker.fault, breaker.opened_at, breaker.probe_at) == ("connect", 100, 105)
    assert [breaker.probe_due(now) for now in (100, 104.9, 105, 900)] == [False, False, True, True]


def test_no_second_probe_is_due_while_one_is_under_way() -> None:
    """Half-open means one probe, and still no claims."""
    breaker = opened().probing()
    assert breaker.state is State.HALF_OPEN
    assert breaker.is_open
    assert not breaker.probe_due(10_000)


def test_wait_doubles_up_to_the_maximum_when_probes_fail() -> None:
    """A provider that is away for long is not hammered, and not forgotten either."""
    breaker, now, waits = opened(now=0), 0.0, []
    for _ in range(4):
        assert breaker.probe_at is not None
        waits.append(breaker.probe_at - now)
        now = breaker.probe_at
        breaker = breaker.probing().probe_failed(now)
    assert waits == [5, 10, 18, 18]
    assert breaker.opened_at == 0


def test_closes_by_itself_when_a_probe_succeeds() -> None:
    """It is as new: nothing counted, the first wait short again."""
    assert opened().probing().probe_succeeded() == Breaker(POLICY)


Step = Callable[[Breaker, float], Breaker]
steps = st.one_of(
    st.builds(
        lambda r, f: lambda b, now: b.failed(r, f, now), st.integers(1, 5), st.sampled_from(["connect", "auth", None])
    ),
    st.just(lambda b, now: b.succeeded()),
    st.just(lambda b, now: b.probing() if b.probe_due(now) else b),
    st.just(lambda b, now: b.probe_failed(now) if b.state is State.HALF_OPEN else b),
    st.just(lambda b, now: b.probe_succeeded() if b.state is State.HALF_OPEN else b),
)


@given(st.lists(st.tuples(steps, st.floats(0, 30)), max_size=60))
def test_always_comes_back_and_never_forgets_whatever_happens(history: list[tuple[Step, float]]) -> None:
    """Open means that a probe is planned within the longest wait; closed means few records counted, all alike."""
    breaker, now = Breaker(POLICY), 0.0
    for step, passed in history:
        now += passed
        breaker = step(breaker, now)
        match breaker.state:
            case State.CLOSED:
                assert len(breaker.records) < POLICY.threshold
                assert bool(breaker.records) == (breaker.fault is not None)
            case State.OPEN:
                assert breaker.probe_at is not None
                assert breaker.probe_at <= now + POLICY.probe_max_seconds
            case State.HALF_OPEN:
                assert breaker.probe_at is None
