"""When the whole provider is away, stop asking it with every row: a circuit breaker, as a pure state machine.

Facts and `now` go in, the next state comes out; nothing is read, waited for or sent here. Closed: rows are claimed.
Open: nothing is claimed until a probe is due. Half-open: one probe is under way and decides. `now` is any clock in
seconds that does not go backwards.

It opens after `threshold` *different* records have failed alike in a row, that is with the same provider-wide fault
(`Retry.fault`). One record that fails again and again is that record's trouble and opens nothing.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum

GROWTH = 2
"""Each failed probe doubles the wait for the next one, up to the policy's maximum."""


class State(StrEnum):
    """Where a breaker can be; the values are for people."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """After how many different records it opens, and the first and the longest wait for a probe, in seconds."""

    threshold: int = 20
    probe_seconds: float = 5.0
    probe_max_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Breaker:
    """An immutable state; every method that tells it a fact answers the next state.

    `fault` is what the last failures have in common (or what opened it), `records` who failed so while it was closed.
    `probe_at` is when the next probe is due while it is open, `opened_at` since when rows have not been claimed.
    """

    policy: BreakerPolicy = field(default_factory=BreakerPolicy)
    state: State = State.CLOSED
    fault: str | None = None
    records: frozenset[int | str] = frozenset()
    delay: float = 0.0
    opened_at: float | None = None
    probe_at: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether nothing may be claimed: open or half-open."""
        return self.state is not State.CLOSED

    def succeeded(self) -> "Breaker":
        """A record was done. While open this is the tail of what was in flight: the probe decides, not the tail."""
        return self if self.is_open else Breaker(self.policy)

    def failed(self, record: int | str, fault: str | None, now: float) -> "Breaker":
        """The record's act failed; `fault` names a provider-wide cause, None means that it was the record's own."""
        if self.is_open:
            return self
        if fault is None:
            return Breaker(self.policy)
        alike = self.records if fault == self.fault else frozenset()
        records = alike | {record}
        if len(records) < self.policy.threshold:
            return replace(self, fault=fault, records=records)
        return self._opened(fault, now)

    def probe_due(self, now: float) -> bool:
        """Whether it is time to try the provider once."""
        return self.state is State.OPEN and self.probe_at is not None and now >= self.probe_at

    def probing(self) -> "Breaker":
        """A probe begins; whoever calls this reports its end with one of the next two, also when it was cancelled."""
        return replace(self, state=State.HALF_OPEN, probe_at=None) if self.state is State.OPEN else self

    def probe_succeeded(self) -> "Breaker":
        """The provider is back: closed, with nothing counted."""
        return Breaker(self.policy)

    def probe_failed(self, now: float) -> "Breaker":
        """Still away: open, and the next probe comes later than the last one did."""
        if not self.is_open:
            return self
        delay = min(self.delay * GROWTH, self.policy.probe_max_seconds)
        return replace(self, state=State.OPEN, delay=delay, probe_at=now + delay)

    def _opened(self, fault: str, now: float) -> "Breaker":
        delay = min(self.policy.probe_seconds, self.policy.probe_max_seconds)
        return Breaker(self.policy, State.OPEN, fault, delay=delay, opened_at=now, probe_at=now + delay)
