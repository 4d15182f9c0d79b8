"""What becomes of a row whose act failed: again at a time, or to rest. A pure decision: no clock, no I/O, no dice.

It implements rules 11 to 13 of the protocol of a row. Who may still write that down is the fence's business, not this
module's.
"""

from dataclasses import dataclass
from enum import StrEnum

from streams.errors import LeaseOver, Reject, Retry

ATTEMPTS_USED_UP = "attempts_used_up"
OUTCOME_UNKNOWN = "outcome_unknown"


class OnUnknown(StrEnum):
    """What to do with a row of which nobody knows whether the other side accepted it."""

    RESEND = "resend"
    HOLD = "hold"


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """How often, how long apart (seconds; the last value repeats), how far spread (0.2: up to 20 % later)."""

    max_attempts: int = 3
    backoff: tuple[float, ...] = (60.0, 300.0, 900.0)
    jitter: float = 0.2
    on_unknown: OnUnknown = OnUnknown.RESEND


@dataclass(frozen=True, slots=True)
class RetryAt:
    """Try again `delay` seconds from now; `in_doubt` says that the row's `doubts` rises by one."""

    delay: float
    in_doubt: bool = False


@dataclass(frozen=True, slots=True)
class Final:
    """The row is failed and a dead letter says so with this `reason`; `held` keeps it from any bulk retry."""

    reason: str
    held: bool = False
    in_doubt: bool = False


def decide(error: Exception, attempts: int, policy: RecoveryPolicy, random: float) -> RetryAt | Final:
    """Decide what becomes of a row.

    `attempts` is the row's number of tries including this one (1 = the first try failed), `random` a number in [0, 1).
    An error outside the vocabulary says nothing about whether the other side accepted, so it counts as in doubt.
    `LeaseOver` is no failure of the row, nothing is to be recorded: asking for it is a mistake (TypeError).
    """
    if isinstance(error, LeaseOver):
        raise TypeError("nothing is recorded for a claim whose lease may be over")
    if isinstance(error, Reject):
        return Final(error.reason)
    in_doubt = error.in_doubt if isinstance(error, Retry) else True
    if in_doubt and policy.on_unknown is OnUnknown.HOLD:
        return Final(OUTCOME_UNKNOWN, held=True, in_doubt=True)
    if attempts >= policy.max_attempts:
        return Final(ATTEMPTS_USED_UP, in_doubt=in_doubt)
    not_before = error.not_before if isinstance(error, Retry) else 0.0
    return RetryAt(max(backoff(attempts, policy, random), not_before), in_doubt)


def backoff(attempts: int, policy: RecoveryPolicy, random: float) -> float:
    """Seconds to wait after this many tries: never less than the step, spread over `jitter` of it.

    Without the spread all that failed in one outage would come back in the same instant, and fail again.
    """
    step = policy.backoff[min(max(attempts, 1), len(policy.backoff)) - 1]
    return step * (1.0 + policy.jitter * random)
