"""What becomes of a row whose act failed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.errors import LeaseOver, Reject, Retry
from streams.recovery import Final, OnUnknown, RecoveryPolicy, RetryAt, backoff, decide

RESEND = RecoveryPolicy(max_attempts=3, backoff=(60, 300, 900), jitter=0.0)
HOLD = RecoveryPolicy(max_attempts=3, backoff=(60, 300, 900), jitter=0.0, on_unknown=OnUnknown.HOLD)
REFUSED = Retry("450 try later")
LOST = Retry("reply lost", in_doubt=True)


@pytest.mark.parametrize(
    ("error", "attempts", "policy", "expected"),
    [
        (REFUSED, 1, RESEND, RetryAt(60)),
        (REFUSED, 2, RESEND, RetryAt(300)),
        (REFUSED, 3, RESEND, Final("attempts_used_up")),
        (REFUSED, 4, RESEND, Final("attempts_used_up")),
        (REFUSED, 1, HOLD, RetryAt(60)),
        (Retry("busy", not_before=30), 1, RESEND, RetryAt(60)),
        (Retry("busy", not_before=400), 2, RESEND, RetryAt(400)),
        (Retry("busy", not_before=400), 3, RESEND, Final("attempts_used_up")),
        (LOST, 1, RESEND, RetryAt(60, in_doubt=True)),
        (LOST, 3, RESEND, Final("attempts_used_up", in_doubt=True)),
        (LOST, 1, HOLD, Final("outcome_unknown", held=True, in_doubt=True)),
        (LOST, 3, HOLD, Final("outcome_unknown", held=True, in_doubt=True)),
        (Reject("rejected", "no such user"), 1, RESEND, Final("rejected")),
        (Reject("rejected", "no such user"), 1, HOLD, Final("rejected")),
        (KeyError("a mistake in the code"), 1, RESEND, RetryAt(60, in_doubt=True)),
        (KeyError("a mistake in the code"), 1, HOLD, Final("outcome_unknown", held=True, in_doubt=True)),
    ],
)
def test_decision_follows_from_error_attempts_and_mode(
    error: Exception, attempts: int, policy: RecoveryPolicy, expected: RetryAt | Final
) -> None:
    """Again while attempts are left, to rest when they are not, held when the mode says so and nobody knows."""
    assert decide(error, attempts, policy, random=0.5) == expected


def test_lease_over_is_refused_when_asked_for() -> None:
    """Nothing may be recorded for a claim whose lease may be over, so there is nothing to decide."""
    with pytest.raises(TypeError):
        decide(LeaseOver(), 1, RESEND, random=0.0)


@pytest.mark.parametrize(("attempts", "step"), [(1, 60), (2, 300), (3, 900), (4, 900), (50, 900), (0, 60)])
def test_last_wait_repeats_when_attempts_outnumber_the_list(attempts: int, step: float) -> None:
    """Raising the attempts needs no longer list."""
    assert backoff(attempts, RESEND, random=0.9) == step


@given(random=st.floats(0, 1, exclude_max=True), attempts=st.integers(1, 10))
def test_wait_is_spread_after_the_step_and_never_before_it(random: float, attempts: int) -> None:
    """What failed together comes back between 60 and 72 s, not all at 60 and none earlier."""
    policy = RecoveryPolicy(max_attempts=20, backoff=(60,), jitter=0.2)
    decision = decide(REFUSED, attempts, policy, random)
    assert isinstance(decision, RetryAt)
    assert 60 <= decision.delay <= 72


def test_waits_differ_when_the_dice_differ() -> None:
    """The spread covers its whole width."""
    policy = RecoveryPolicy(backoff=(60,), jitter=0.2)
    assert [backoff(1, policy, dice) for dice in (0.0, 0.5, 1.0)] == pytest.approx([60, 66, 72])
