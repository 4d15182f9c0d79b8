"""The slots of a process: who may act now, and acting.

A slot is taken with a claim and free with the commit of its outcome.

Pace, in-doubt permits and the breakers of the lanes say no here, before a claim. What comes of an act goes to the
recorder's inbox (`group.py`), whatever it is.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from streams import recovery, telemetry
from streams.assignment import Assignment, Entry
from streams.breaker import Breaker
from streams.errors import LeaseOver, Reject, Retry
from streams.group import Inbox, Work
from streams.lanes import Candidate, Lane, Lanes, Roads
from streams.masking import mask
from streams.pace import Pace
from streams.processor import Claim, Gate, Limits, Records, RowProcessor, clock
from streams.rows import Outcome
from streams.sql import Row, storable

log = structlog.get_logger(__name__)

NET_SECONDS = 1.0
"""So long after its deadline, at the latest, an act is ended that does not end itself."""

Step = Callable[[str], None]
"""Called with the name of each step as it is reached; tests make a process die there."""


class Slots:
    """At most `limits.slots` rows of a process are claimed at any time: so many, and no more, can a kill count."""

    def __init__(
        self,
        processor: RowProcessor,
        limits: Limits,
        metrics: telemetry.Metrics,
        inbox: Inbox,
        step: Step,
        lanes: Lanes | None,
    ) -> None:
        self.processor, self.limits = processor, limits
        self._records = isinstance(processor, Records)
        self.inbox, self.step, self._metrics = inbox, step, metrics
        self.roads = Roads(lanes, limits.slots, limits.breaker)
        self.free = limits.slots
        self.closed = False
        """Nothing more is claimed: the process is stopping."""
        self.in_flight: dict[Assignment, int] = defaultdict(int)
        self._acts: dict[Work, asyncio.Task[None]] = {}
        self._net: asyncio.TimerHandle | None = None
        self._permits = asyncio.Semaphore(limits.in_doubt) if limits.in_doubt < limits.slots else None
        self._pace = Pace(limits.rate_per_second)
        self._pace_timer: asyncio.TimerHandle | None = None

    @property
    def breaker(self) -> Breaker:
        """That of the provider; of the only one, where the processor has no lanes."""
        return self.roads[""].breaker

    def cancel(self) -> None:
        """Let go of the acts that are still under way; their leases pass."""
        if self._net is not None:
            self._net.cancel()
        for act in self._acts.values():
            act.cancel()

    # ---- who may

    def reserve(self, assignment: Assignment, wanted: int) -> int:
        """How many of the free slots may be claimed for now: not while stopping, paused, fenced, broken or too fast."""
        broken = self.roads.lanes is None and self.breaker.is_open
        if self.closed or broken or not assignment.reading:
            return 0
        granted = self._pace.grant(min(self.free, wanted), clock())
        self.free -= granted
        if granted < min(self.free + granted, wanted):
            self._wake_when_paced()
        return granted

    def _wake_when_paced(self) -> None:
        loop = asyncio.get_running_loop()
        if self._pace_timer is None or self._pace_timer.when() <= loop.time():
            self._pace_timer = loop.call_later(self._pace.wait(clock()) + 0.001, self.inbox.wake)

    def choose(self, candidates: Sequence[Candidate], slots: int) -> tuple[list[Candidate], list[Candidate]]:
        """Those to claim at once, as far as there are slots and their lanes have room; and the rest."""
        chosen: list[Candidate] = []
        rest: list[Candidate] = []
        for candidate in candidates:
            lane = self.roads[candidate.lane]
            if len(chosen) < slots and not lane.breaker.is_open and lane.busy < lane.width:
                lane.take(candidate.row_id)
                chosen.append(candidate)
            else:
                rest.append(candidate)
        return chosen, rest

    def give_back(self, candidates: Iterable[Candidate]) -> None:
        """They were not claimed after all: their lanes have room again."""
        for candidate in candidates:
            self.roads[candidate.lane].give_back(candidate.row_id, clock())

    # ---- acting

    def start_claimed(
        self, asked: Sequence[tuple[Assignment, Candidate]], claimed: Sequence[Row], t0: float, reserved: int
    ) -> None:
        rows = {row["id"]: row for row in claimed}
        self.step("claimed")
        for assignment, candidate in asked:
            row = rows.pop(candidate.row_id, None)
            if row is None:
                self.give_back([candidate])
                self.inbox.refused(assignment, candidate)
            else:
                self._start(assignment, candidate, row, t0)
        self.free += reserved - len(claimed)

    def start_unasked(
        self, assignment: Assignment, entries: Mapping[int, Entry], claimed: Sequence[Row], t0: float, reserved: int
    ) -> None:
        """Start what was claimed by ids alone; of the `reserved` slots the unused ones are free again."""
        rows = {row["id"]: row for row in claimed}
        self.step("claimed")
        for row_id, entry in entries.items():
            row = rows.get(row_id)
            if row is None:
                self.inbox.refused(assignment, Candidate(entry, row_id, None, None))
            else:
                lane = self.roads[self.roads.of(row)]
                lane.busy += 1
                self._start(assignment, Candidate(entry, row_id, row["row_key"], None, lane.name), row, t0)
        self.free += reserved - len(claimed)

    def _start(self, assignment: Assignment, candidate: Candidate, row: Row, t0: float) -> None:
        limits, loop = self.limits, asyncio.get_running_loop()
        claim = Claim(candidate.row_id, row["claim_no"], row["attempts"], candidate.key, row, candidate.payload)
        gate = Gate(
            loop.time() + limits.act_timeout,
            t0 + limits.lease - limits.reserve,
            self._permits.acquire if self._permits is not None else None,
        )
        self.in_flight[assignment] += 1
        work = Work(assignment, candidate.entry, claim, gate, self.roads[candidate.lane])
        self._acts[work] = loop.create_task(self._act(work))
        if self._net is None:
            self._net = loop.call_later(NET_SECONDS / 2, self._end_overdue)

    def _end_overdue(self) -> None:
        """An act ends by its deadline itself; this is the net under all of them, one timer instead of one for each.

        One that has not begun is left to begin: cancelled before, it could tell nobody, and its slot would be lost. In
        a process that was stopped for a while timers may run first.
        """
        loop = asyncio.get_running_loop()
        for work, task in self._acts.items():
            if work.begun and not work.overdue and loop.time() >= work.gate.deadline + NET_SECONDS / 2:
                work.overdue = task.cancel()
        self._net = loop.call_later(NET_SECONDS / 2, self._end_overdue) if self._acts else None

    async def _act(self, work: Work) -> None:
        """Bring one row about. Whatever happens, the recorder gets to know."""
        claim, gate = work.claim, work.gate
        work.begun, started = True, clock()
        try:
            stored = await self.processor.act(claim, gate)
            work.outcome = Outcome(claim.row_id, claim.claim_no, sent=True)
            if self._records:
                work.done = stored
            else:
                work.outcome.stored = _stored(stored)
        except LeaseOver as error:
            work.error = error
        except asyncio.CancelledError:
            if not work.overdue:
                raise
            work.error = TimeoutError("the act did not end by its deadline")
            work.outcome = self.failure(work, work.error)
        except Exception as error:
            work.error = error
            work.outcome = self.failure(work, error)
        finally:
            del self._acts[work]
        self._metrics.act_seconds(self.processor.name, clock() - started)
        self._learn(work)
        self.step("acted")
        self.inbox.finished(work)

    def failure(self, work: Work, error: Exception) -> Outcome:
        """Rules 11 to 13, for each number of attempts that the row may have by then: a person may have set it back."""
        if not isinstance(error, Retry | Reject):
            log.warning("act.unexpected_error", processor=self.processor.name, row_id=work.claim.row_id, exc_info=error)
            error = Retry(f"{type(error).__name__}: {error}", in_doubt=work.gate.passed)
        policy, dice = self.limits.recovery, random.random()
        decisions = [recovery.decide(error, n, policy, dice) for n in range(1, policy.max_attempts + 1)]
        last = decisions[-1]
        held = isinstance(last, recovery.Final) and last.held
        return Outcome(
            work.claim.row_id,
            work.claim.claim_no,
            error=storable(str(error), 2000),
            reason=last.reason if isinstance(last, recovery.Final) else recovery.ATTEMPTS_USED_UP,
            waits=tuple(d.delay if isinstance(d, recovery.RetryAt) else None for d in decisions),
            held=held,
            in_doubt=last.in_doubt,
        )

    def _learn(self, work: Work) -> None:
        """Tell the breaker of the lane, which stops its claims when the provider is plainly away."""
        lane, was_open = work.lane, work.lane.breaker.is_open
        lane.learn(work.claim.row_id, work.error, clock())
        if lane.breaker.is_open != was_open:
            self._turned(lane)

    def _turned(self, lane: Lane) -> None:
        """The breaker of a lane has opened or closed."""
        if lane.breaker.is_open:
            log.error("breaker.opened", processor=self.processor.name, lane=lane.name, fault=lane.breaker.fault)
        else:
            log.info("breaker.closed", processor=self.processor.name, lane=lane.name)
        self._metrics.breaker_open(self.processor.name, self.roads.any_open)
        self.inbox.wake()

    async def watch_provider(self, lane: Lane) -> None:
        """While the breaker is open, probe the provider without a row; close by itself when it is back."""
        while True:
            await asyncio.sleep(0.1 if lane.breaker.is_open else 0.5)
            if not lane.breaker.probe_due(clock()):
                continue
            lane.breaker = lane.breaker.probing()
            try:
                async with asyncio.timeout(self.limits.act_timeout):
                    await self.processor.probe()
            except Exception as error:
                lane.breaker = lane.breaker.probe_failed(clock())
                log.warning("breaker.probe_failed", processor=self.processor.name, error=mask(str(error)))
            else:
                lane.breaker = lane.breaker.probe_succeeded()
                self._turned(lane)

    def committed(self, work: Work) -> None:
        """The outcome is committed: the mail is no longer in doubt."""
        self.in_flight[work.assignment] -= 1
        if work.gate.holds_permit and self._permits is not None:
            self._permits.release()


def bare(candidates: Sequence[Candidate]) -> list[int]:
    """Those whose payload is here: the columns of their rows would be fetched for nothing."""
    return [candidate.row_id for candidate in candidates if candidate.payload is not None]


def _stored(columns: Mapping[str, object]) -> dict[str, object]:
    return {f"new_{name}": storable(value) if isinstance(value, str) else value for name, value in columns.items()}
