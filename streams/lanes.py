"""Lanes: one for each provider that a processor's rows go to, with a bound and a breaker of its own.

A lane that is full or broken holds up its own rows and no others. Without `Lanes` a processor has one lane, as wide as
its slots. Pure state, no I/O; `runtime.py` asks before each claim and tells each outcome.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from streams.assignment import Entry
from streams.breaker import Breaker, BreakerPolicy, State
from streams.errors import LeaseOver, Retry
from streams.sql import Row


@dataclass(frozen=True, slots=True)
class Lanes:
    """For a processor whose rows go to several providers.

    `of` names a row's lane by its columns of `RowTable.known` (and `attempts`); `width` bounds the acts at once in
    each. While a lane's breaker is open its rows are deferred, without a claim; when a probe is due, the row with the
    fewest attempts is it.
    """

    of: Callable[[Row], str]
    width: int


class Candidate(NamedTuple):
    """A record whose row may be claimed as soon as a slot is free."""

    entry: Entry
    row_id: int
    key: str | None
    payload: object
    lane: str = ""
    attempts: int = 0


@dataclass(slots=True, eq=False)
class Lane:
    """One provider: how much is under way to it, and whether it is away."""

    name: str
    width: int
    by_row: bool
    """Whether its breaker is probed by a row; else by `RowProcessor.probe`."""
    breaker: Breaker
    busy: int = 0
    probe: int | None = None
    """The row that is under way as a probe."""

    def has_room(self, now: float) -> bool:
        """Whether one more row may be claimed."""
        if self.breaker.is_open:
            return self.by_row and self.breaker.probe_due(now)
        return self.busy < self.width

    def take(self, row_id: int) -> None:
        """This row is going to be claimed."""
        self.busy += 1
        if self.breaker.is_open:
            self.breaker, self.probe = self.breaker.probing(), row_id

    def give_back(self, row_id: int, now: float) -> None:
        """It was not claimed after all, or its outcome is committed. A probe that did not happen is due again."""
        self.busy -= 1
        if row_id == self.probe:
            self.probe, self.breaker = None, replace(self.breaker, state=State.OPEN, probe_at=now)

    def learn(self, row_id: int, error: Exception | None, now: float) -> None:
        """How an act ended."""
        if row_id == self.probe:
            self.probe = None
            failed = error is not None and _fault(error) is not None
            self.breaker = self.breaker.probe_failed(now) if failed else self.breaker.probe_succeeded()
        elif error is None:
            self.breaker = self.breaker.succeeded()
        elif not isinstance(error, LeaseOver):
            self.breaker = self.breaker.failed(row_id, _fault(error), now)

    def deferral(self, now: float) -> float | None:
        """For how many seconds its rows are to be deferred, None while they need not be."""
        at = self.breaker.probe_at
        if not self.by_row or self.breaker.state is not State.OPEN or at is None or at <= now:
            return None
        return at - now


def _fault(error: Exception) -> str | None:
    """What says that the provider is away. A lease that ended says nothing, so a probe that ended so has failed."""
    return "lease over" if isinstance(error, LeaseOver) else error.fault if isinstance(error, Retry) else None


@dataclass(slots=True)
class Roads:
    """All lanes of a process, made when they are first needed. They are few: one for each provider."""

    lanes: Lanes | None
    slots: int
    policy: BreakerPolicy
    known: dict[str, Lane] = field(default_factory=dict)
    held: int = 0
    """Rows that are being claimed and whose lane nobody knows yet: they count as busy in each."""

    def hold(self, rows: int) -> bool:
        """Keep room for so many rows, whichever lanes they turn out to belong to; False where a lane has too little."""
        width = self.slots if self.lanes is None else self.lanes.width
        if rows > width or any(lane.breaker.is_open or lane.busy + rows > width for lane in self.known.values()):
            return False
        self._hold(rows)
        return True

    def release(self, rows: int) -> None:
        """Their lanes are known, or they were not claimed."""
        self._hold(-rows)

    def _hold(self, rows: int) -> None:
        self.held += rows
        for lane in self.known.values():
            lane.busy += rows

    def __getitem__(self, name: str) -> Lane:
        lane = self.known.get(name)
        if lane is None:
            width = self.slots if self.lanes is None else self.lanes.width
            lane = self.known[name] = Lane(name, width, self.lanes is not None, Breaker(self.policy), self.held)
        return lane

    def of(self, row: Row) -> str:
        """The lane of a row."""
        return "" if self.lanes is None else self.lanes.of(row)

    @property
    def any_open(self) -> bool:
        """Whether some provider counts as away."""
        return any(lane.breaker.is_open for lane in self.known.values())


class Waiting:
    """The candidates of one partition that wait for a slot, by lane, each lane in order."""

    def __init__(self, roads: Roads) -> None:
        self._roads = roads
        self._queues: dict[str, deque[Candidate]] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def clear(self) -> None:
        """Forget them; they are read again."""
        self._queues.clear()

    def extend(self, candidates: Iterable[Candidate]) -> None:
        """Behind those that wait already."""
        for candidate in candidates:
            self._queues.setdefault(candidate.lane, deque()).append(candidate)

    def put_back(self, candidate: Candidate) -> None:
        """It was taken and not used."""
        self._queues.setdefault(candidate.lane, deque()).appendleft(candidate)

    def next_lane(self, now: float) -> Lane | None:
        """The least busy lane that has room and somebody waiting."""
        lanes = [self._roads[name] for name, queue in self._queues.items() if queue]
        return min((lane for lane in lanes if lane.has_room(now)), key=lambda lane: lane.busy, default=None)

    def take(self, lane: Lane) -> Candidate:
        """The first of a lane; as a probe the one with the fewest attempts."""
        queue = self._queues[lane.name]
        if lane.breaker.is_open:
            candidate = min(queue, key=lambda waiting: waiting.attempts)
            queue.remove(candidate)
        else:
            candidate = queue.popleft()
        lane.take(candidate.row_id)
        return candidate

    def deferred(self, now: float) -> Iterator[tuple[Candidate, float]]:
        """Take out all whose provider is away: with the seconds until it is probed."""
        for name, queue in self._queues.items():
            seconds = self._roads[name].deferral(now)
            while queue and seconds is not None:
                yield queue.popleft(), seconds
