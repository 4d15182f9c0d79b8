"""READ FIRST: one turn of a row processor, as a list of named steps.

    take -> decode -> plan -> act -> record (with the advance of the offset)

Two invariants, which every line here serves and `tests/fault` proves:

1. *The offset moves only in the transaction that settles the record*, or after it; never before.
2. *Every record that was read is done, waiting or dead, and a row says so.*

A turn takes what is ready and goes one way. plan inserts and claims in one short transaction. act runs without any
transaction, in at most `slots` slots. One recorder commits what has gathered while its last commit ran: outcomes,
dead letters, the offsets that they settle, and the claims for the slots that became free. A slot goes on only after
that commit, so that no more mails are in doubt than there are slots. The rules that are named by number are those of
docs/life-of-a-row.md.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from streams import recovery, telemetry
from streams.assignment import KILLS_ITS_READER, MAX_ID, Assignment, Entry
from streams.breaker import Breaker
from streams.database import dialect, is_away
from streams.dead_letters import DeadLetter, lay
from streams.errors import LeaseOver, Reject, Retry, Undecodable
from streams.lanes import Candidate, Lane, Lanes, Roads, Waiting
from streams.log import Log, Record
from streams.masking import mask
from streams.message import decode
from streams.offsets import Advance
from streams.pace import Pace
from streams.processor import Claim, Gate, Limits, NewRow, RowProcessor, RowRef, clock
from streams.rows import Outcome, Recorded, Rows
from streams.sql import Database, Row, Sql, storable

log = structlog.get_logger(__name__)

LOCK_TIMEOUT_MS = 2000
"""How long the recorder waits for a row that somebody has locked before it records the others without it."""
LOCK_NOT_AVAILABLE = "55P03"

Step = Callable[[str], None]
"""Called with the name of each step as it is reached; tests make a process die there."""


@dataclass(slots=True, eq=False)
class Work:
    """A claim under way, and at its end the outcome (None: the lease was over, nothing is recorded)."""

    assignment: Assignment
    entry: Entry
    claim: Claim
    gate: Gate
    lane: Lane
    outcome: Outcome | None = None
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class Group:
    """What one commit of the recorder holds: whatever gathered while the last one ran."""

    finished: list[Work] = field(default_factory=list)
    refused: list[tuple[Assignment, Candidate]] = field(default_factory=list)
    deferred: list[tuple[Assignment, Candidate, float]] = field(default_factory=list)
    dead: list[tuple[Assignment, Entry, DeadLetter]] = field(default_factory=list)
    claims: list[tuple[Assignment, Candidate]] = field(default_factory=list)
    advances: list[tuple[Assignment, Advance, Entry]] = field(default_factory=list)
    slots: int = 0
    """How many slots are free once this is committed, less the claims that succeed."""
    started: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.finished or self.refused or self.deferred or self.dead or self.claims or self.advances)

    def assignments(self) -> set[Assignment]:
        """Whose records are in this group, claims included."""
        pairs = [*self.refused, *self.claims, *((assignment, c) for assignment, c, _ in self.deferred)]
        letters = [assignment for assignment, _, _ in self.dead]
        return {work.assignment for work in self.finished} | {assignment for assignment, _ in pairs} | set(letters)

    def settle(self, settled: bool = True) -> None:
        """The offset may pass the records of this group, or has to wait for its commit."""
        for entry in self.entries():
            entry.settled = settled

    def entries(self) -> list[Entry]:
        """The records of which this group holds the outcome."""
        refused, dead = [c.entry for _, c in self.refused], [entry for _, entry, _ in self.dead]
        return [work.entry for work in self.finished] + refused + dead + [c.entry for _, c, _ in self.deferred]

    @property
    def outcomes(self) -> list[Outcome]:
        return [work.outcome for work in self.finished if work.outcome is not None]


class Runtime:
    """Runs one row processor over all partitions of its stream, in one process."""

    def __init__(
        self,
        processor: RowProcessor,
        source: Log,
        engine: AsyncEngine,
        limits: Limits,
        metrics: telemetry.Metrics,
        step: Step = lambda name: None,
        lanes: Lanes | None = None,
    ) -> None:
        self.processor, self.limits = processor, limits
        self._log, self._metrics, self._step = source, metrics, step
        self._database = Database(engine, limits.database_away)
        self._rows = Rows(processor.table, limits, dialect(engine))
        self._assignments: list[Assignment] = []
        self._roads = Roads(lanes, limits.slots, limits.breaker)
        self._candidates: dict[Assignment, Waiting] = {}
        self._in_flight: dict[Assignment, int] = {}
        self._acts: set[asyncio.Task[None]] = set()
        self._free = limits.slots
        self._group = Group()
        self._committing: Group | None = None
        self._apart: set[Group] = set()
        """Parts of a group that somebody's lock holds up."""
        self._tasks = asyncio.TaskGroup()
        self._work = asyncio.Event()
        self._progress = asyncio.Condition()
        self._stopping = False
        self._permits = asyncio.Semaphore(limits.in_doubt) if limits.in_doubt < limits.slots else None
        self._pace = Pace(limits.rate_per_second)
        self._pace_timer: asyncio.TimerHandle | None = None

    @property
    def breaker(self) -> Breaker:
        """That of the provider; of the only one, where the processor has no lanes."""
        return self._roads[""].breaker

    # ---- life

    async def run(self, stop: asyncio.Event) -> None:
        """Read, claim, act and record until `stop`; then finish what is in flight, record it, and close."""
        try:
            await self._run(stop)
        finally:
            for act in self._acts:
                act.cancel()

    async def _run(self, stop: asyncio.Event) -> None:
        async with self._tasks as tasks:
            background = [tasks.create_task(self._record_forever())]
            if self._roads.lanes is None:
                background.append(tasks.create_task(self._watch_provider(self._roads[""])))
            for partition in await self._log.partitions(self.processor.stream):
                assignment = self._assign(partition)
                assignment.subscription = await self._log.subscribe(partition, self.processor.name, assignment)
                background.append(tasks.create_task(self._feed(assignment)))
                background.append(tasks.create_task(self._look(assignment)))
            await stop.wait()
            await self._finish_all()
            for task in background:
                task.cancel()
        for assignment in self._assignments:
            if assignment.subscription is not None:
                await assignment.subscription.close()

    def _assign(self, partition: Any) -> Assignment:
        assignment = Assignment(
            self.processor.name, partition, self._log, self._database.open, finish=self._finish, changed=self._changed
        )
        self._assignments.append(assignment)
        self._candidates[assignment] = Waiting(self._roads)
        self._in_flight[assignment] = 0
        return assignment

    async def _finish_all(self) -> None:
        self._stopping = True
        log.info("processor.stopping", processor=self.processor.name, in_flight=sum(self._in_flight.values()))
        for assignment in self._assignments:
            async with assignment.turn:
                await self._finish(assignment)

    async def _finish(self, assignment: Assignment) -> None:
        """Wait until nothing of the assignment is in flight and its settled records are committed; forget the rest."""
        self._candidates[assignment].clear()
        self._work.set()
        async with self._progress:
            await self._progress.wait_for(lambda: self._quiet(assignment))

    def _quiet(self, assignment: Assignment) -> bool:
        if self._in_flight[assignment] or assignment.advance() is not None:
            return False
        groups = [self._group, *self._apart] + ([] if self._committing is None else [self._committing])
        return not any(assignment in group.assignments() for group in groups)

    def _changed(self, assignment: Assignment) -> None:
        if assignment.fenced:
            self._candidates[assignment].clear()
        self._work.set()

    # ---- take, decode, plan

    async def _feed(self, assignment: Assignment) -> None:
        while not self._stopping:
            await asyncio.sleep(0)  # with records at hand nothing below need wait: it would hold the loop, and the stop
            await assignment.readable()
            await self._room(assignment)
            if assignment.subscription is not None:
                await assignment.subscription.ready()
            async with assignment.turn:
                if assignment.reading and not self._stopping:
                    await self._turn(assignment)

    async def _room(self, assignment: Assignment) -> None:
        """Wait until the next turn is wanted: planned ahead while this one is sent, and memory stays bounded."""
        ahead, behind = self.limits.turn_records // 2, self.limits.turn_records * 10

        def room() -> bool:
            if assignment.isolated:
                return not assignment.window.entries
            # a lane that is full must not keep the others' records from being read
            near = self._roads.lanes is not None or len(self._candidates[assignment]) <= ahead
            return near and len(assignment.window.entries) < behind

        async with self._progress:
            await self._progress.wait_for(room)

    async def _turn(self, assignment: Assignment) -> None:
        """One turn up to the plan; acting and recording go on by themselves."""
        records = assignment.take(1 if assignment.isolated else self.limits.turn_records)
        if not records:
            return
        entries = [assignment.enter(record) for record in records]
        starts = await self._database.patiently(assignment.begin)
        self._step("taken")
        if starts > KILLS_ITS_READER + 1:
            self._lay_to_rest(
                assignment, entries[0], records[0], "kills_its_reader", f"{starts - 1} starts ended at this record"
            )
            records, entries = records[1:], entries[1:]
        planned = await self._decode(assignment, records, entries)
        self._step("decoded")
        await self._database.patiently(lambda sql: self._plan_safely(sql, assignment, planned))
        self._step("planned")
        self._work.set()

    async def _decode(
        self, assignment: Assignment, records: Sequence[Record], entries: Sequence[Entry]
    ) -> list[tuple[Entry, Record, NewRow | RowRef]]:
        planned: list[tuple[Entry, Record, NewRow | RowRef]] = []
        for n, (record, entry) in enumerate(zip(records, entries, strict=True), 1):
            try:
                message = decode(record.data)
                entry.record_id = storable(message.id, MAX_ID)
                planned.append((entry, record, self.processor.plan(message)))
            except Undecodable as error:
                self._lay_to_rest(assignment, entry, record, "undecodable", str(error))
            except Reject as error:
                self._lay_to_rest(assignment, entry, record, error.reason, error.error)
            except Exception as error:  # a fault of ours in one record must not stop the others
                log.exception("record.not_planned", stream=assignment.partition.name, offset=record.offset)
                self._lay_to_rest(assignment, entry, record, "unexpected_error", type(error).__name__)
            if n % 10 == 0:
                await asyncio.sleep(0)  # let replies, commits and heartbeats in while mails are rendered
        return planned

    async def _plan_safely(
        self, sql: Sql, assignment: Assignment, planned: list[tuple[Entry, Record, NewRow | RowRef]]
    ) -> None:
        """plan; record by record when the database refuses what is in the turn, so that one is laid to rest alone."""
        try:
            await self._plan(sql, assignment, planned)
        except Exception as error:
            if is_away(error):
                raise
            if len(planned) <= 1:
                # not the error's text: it quotes the row, which is somebody's data
                log.error(  # noqa: TRY400 - see above
                    "record.refused_by_database",
                    stream=assignment.partition.name,
                    error=type(error).__name__,
                    sqlstate=getattr(error, "sqlstate", None),
                )
                for entry, record, _ in planned:
                    self._lay_to_rest(assignment, entry, record, "unexpected_error", type(error).__name__)
                await assignment.begun(sql)
                return
            while planned:
                await self._plan_safely(sql, assignment, planned[:1])
                del planned[:1]  # for good, also when the database goes away before the next

    async def _plan(
        self, sql: Sql, assignment: Assignment, planned: Sequence[tuple[Entry, Record, NewRow | RowRef]]
    ) -> None:
        """Insert what is new and claim for free slots, in one transaction; what is not claimable is settled."""
        reserved = self._reserve_slots(assignment, len(planned))
        t0 = clock()
        claimed: list[Row] = []
        chosen: list[Candidate] = []
        try:
            async with sql.transaction():
                candidates = await self._insert_and_look(sql, planned)
                chosen, rest = self._choose(candidates, reserved)
                claimed = await self._rows.claim(sql, [c.row_id for c in chosen], _bare(chosen))
                await assignment.begun(sql)
        except BaseException:
            self._free += reserved
            self._give_back(chosen)
            raise
        waiting = {id(candidate.entry) for candidate in candidates}
        for entry, _, _ in planned:
            entry.settled = id(entry) not in waiting
        self._start_claimed([(assignment, c) for c in chosen], claimed, t0, reserved)
        self._candidates[assignment].extend(rest)

    def _choose(self, candidates: Sequence[Candidate], slots: int) -> tuple[list[Candidate], list[Candidate]]:
        """Those to claim at once, as far as there are slots and their lanes have room; and the rest."""
        chosen: list[Candidate] = []
        rest: list[Candidate] = []
        for candidate in candidates:
            lane = self._roads[candidate.lane]
            if len(chosen) < slots and not lane.breaker.is_open and lane.busy < lane.width:
                lane.take(candidate.row_id)
                chosen.append(candidate)
            else:
                rest.append(candidate)
        return chosen, rest

    def _give_back(self, candidates: Iterable[Candidate]) -> None:
        """They were not claimed after all: their lanes have room again."""
        for candidate in candidates:
            self._roads[candidate.lane].give_back(candidate.row_id, clock())

    async def _insert_and_look(
        self, sql: Sql, planned: Sequence[tuple[Entry, Record, NewRow | RowRef]]
    ) -> list[Candidate]:
        news: dict[str, tuple[Entry, NewRow]] = {}
        again: list[tuple[Entry, NewRow]] = []
        refs = [(entry, row) for entry, _, row in planned if isinstance(row, RowRef)]
        for entry, _, row in planned:
            if isinstance(row, NewRow):
                if row.key in news:
                    again.append((entry, row))
                else:
                    news[row.key] = (entry, row)
        fresh = (
            {r["row_key"]: r["id"] for r in await self._rows.insert(sql, [row for _, row in news.values()])}
            if news
            else {}
        )
        known = [(entry, row) for entry, row in news.values() if row.key not in fresh]
        found = await self._rows.states(
            sql, list({row.key for _, row in known + again}), list({row.row_id for _, row in refs})
        )
        by_key, by_id = {r["row_key"]: r for r in found}, {r["id"]: r for r in found}
        if known or again:
            await self.processor.known(sql, [(row, by_key[row.key]) for _, row in known + again if row.key in by_key])
        lane = self._roads.of
        candidates = [
            Candidate(e, fresh[k], k, row.payload, lane(row.values)) for k, (e, row) in news.items() if k in fresh
        ]
        candidates += [
            _of_row(e, by_key[row.key], lane) for e, row in known if row.key in by_key and by_key[row.key]["claimable"]
        ]
        seen: set[int] = set()
        for entry, ref in refs:
            state = by_id.get(ref.row_id)
            if state is not None and state["claimable"] and ref.row_id not in seen:
                seen.add(ref.row_id)
                candidates.append(_of_row(entry, state, lane))
        candidates.sort(key=lambda candidate: candidate.entry.offset)
        return candidates

    def _lay_to_rest(self, assignment: Assignment, entry: Entry, record: Record, reason: str, error: str) -> None:
        p = assignment.partition
        letter = DeadLetter(
            self.processor.name, p.stream, p.index, reason, mask(error), offset=record.offset, body=record.data
        )
        log.error("record.dead", stream=p.name, offset=record.offset, reason=reason)
        self._group.dead.append((assignment, entry, letter))
        self._work.set()

    # ---- act

    def _reserve_slots(self, assignment: Assignment, wanted: int) -> int:
        """How many of the free slots may be claimed for now: not while stopping, paused, fenced, broken or too fast."""
        broken = self._roads.lanes is None and self.breaker.is_open
        if self._stopping or broken or not assignment.reading:
            return 0
        granted = self._pace.grant(min(self._free, wanted), clock())
        self._free -= granted
        if granted < min(self._free + granted, wanted):
            self._wake_when_paced()
        return granted

    def _wake_when_paced(self) -> None:
        loop = asyncio.get_running_loop()
        if self._pace_timer is None or self._pace_timer.when() <= loop.time():
            self._pace_timer = loop.call_later(self._pace.wait(clock()) + 0.001, self._work.set)

    def _start_claimed(
        self, asked: Sequence[tuple[Assignment, Candidate]], claimed: Sequence[Row], t0: float, reserved: int
    ) -> None:
        rows = {row["id"]: row for row in claimed}
        self._step("claimed")
        for assignment, candidate in asked:
            row = rows.pop(candidate.row_id, None)
            if row is None:
                self._give_back([candidate])
                self._group.refused.append((assignment, candidate))
                self._work.set()
            else:
                self._start(assignment, candidate, row, t0)
        self._free += reserved - len(claimed)

    def _start(self, assignment: Assignment, candidate: Candidate, row: Row, t0: float) -> None:
        limits, loop = self.limits, asyncio.get_running_loop()
        claim = Claim(candidate.row_id, row["claim_no"], row["attempts"], candidate.key, row, candidate.payload)
        gate = Gate(
            loop.time() + limits.act_timeout,
            t0 + limits.lease - limits.reserve,
            self._permits.acquire if self._permits is not None else None,
        )
        self._in_flight[assignment] += 1
        work = Work(assignment, candidate.entry, claim, gate, self._roads[candidate.lane])
        task = loop.create_task(self._act(work))
        self._acts.add(task)
        task.add_done_callback(self._acts.discard)

    async def _act(self, work: Work) -> None:
        """Bring one row about. Whatever happens, the recorder gets to know."""
        claim, gate = work.claim, work.gate
        started = clock()
        try:
            # the act ends by its deadline itself; this is the net under it
            async with asyncio.timeout_at(gate.deadline + 1.0):
                stored = await self.processor.act(claim, gate)
            work.outcome = Outcome(claim.row_id, claim.claim_no, sent=True, stored=_stored(stored))
        except LeaseOver as error:
            work.error = error
        except Exception as error:
            work.error = error
            work.outcome = self._failure(work, error)
        self._metrics.act_seconds(self.processor.name, clock() - started)
        self._learn(work)
        self._step("acted")
        self._group.finished.append(work)
        self._work.set()

    def _failure(self, work: Work, error: Exception) -> Outcome:
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
        self._metrics.breaker_open(self.processor.name, self._roads.any_open)
        self._work.set()

    async def _watch_provider(self, lane: Lane) -> None:
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

    # ---- record and advance

    async def _record_forever(self) -> None:
        """The recorder: one connection, one commit after the other, each with all that has gathered meanwhile."""
        while True:
            await self._work.wait()
            await self._database.patiently(self._record_on)

    async def _record_on(self, connection: Sql) -> None:
        """Record on this connection while it lasts; what was being committed when it broke is committed by the next."""
        if connection.dialect == "postgresql":
            await connection.fetch(f"SET lock_timeout = {LOCK_TIMEOUT_MS}")
        while True:
            if self._committing is not None:
                await self._commit(connection, self._committing)
                self._committing = None
            async with self._progress:
                self._progress.notify_all()
            await self._work.wait()
            self._work.clear()
            self._committing = self._gather() or None

    def _gather(self) -> Group:
        """What has ended since the last commit, the records that it settles, and claims for the slots that it frees."""
        group, self._group = self._group, Group()
        group.deferred = self._deferred()
        group.settle()
        for assignment in self._assignments:
            if (move := assignment.advance()) is not None:
                group.advances.append((assignment, *move))
        finished = len(group.finished)
        self._free += finished
        for work in group.finished:
            work.lane.give_back(work.claim.row_id, clock())
        group.claims = self._next_claims()
        # what the claims do not use stays taken until the outcomes are committed: a plan may not claim for it before
        self._free -= max(0, finished - len(group.claims))
        group.slots = max(finished, len(group.claims))
        group.started = clock()
        return group

    def _deferred(self) -> list[tuple[Assignment, Candidate, float]]:
        """Whose provider is away: until it is probed, and but for the first some time later, not all at once."""
        now = clock()
        found = [(a, c, s) for a in self._assignments for c, s in self._candidates[a].deferred(now)]
        return [(a, c, s * (1 + random.random()) if n else s) for n, (a, c, s) in enumerate(found)]

    def _next_claims(self) -> list[tuple[Assignment, Candidate]]:
        """Candidates for the free slots, in turn from each partition, where their lanes have room."""
        claims: list[tuple[Assignment, Candidate]] = []
        queues = [(a, q) for a, q in self._candidates.items() if q and a.reading]
        while queues and self._free:
            for assignment, waiting in list(queues):
                lane = waiting.next_lane(clock())
                if lane is None or not self._reserve_slots(assignment, 1):
                    queues.remove((assignment, waiting))
                else:
                    claims.append((assignment, waiting.take(lane)))
        return claims

    async def _commit(self, connection: Sql, group: Group) -> None:
        """Commit the group for good, or end the process: a mail that went out is a fact and stays recorded."""
        self._step("recording")
        try:
            recorded = await self._commit_once(connection, group)
        except Exception as error:
            if getattr(error, "sqlstate", None) != LOCK_NOT_AVAILABLE:
                raise
            self._part(group)
        else:
            self._step("recorded")
            self._database.answered()
            self._conclude(group, recorded)

    def _part(self, group: Group) -> None:
        """Somebody has locked a row of the group, or a position: record each outcome by itself, and go on meanwhile.

        Only the locked one waits; its slot stays taken, and the offset stays before its record.
        """
        log.warning("record.row_is_locked", processor=self.processor.name, outcomes=len(group.finished))
        parts = [Group(finished=[work], slots=1, started=group.started) for work in group.finished]
        if group.dead or group.refused or group.deferred:
            rest = Group(dead=group.dead, refused=group.refused, deferred=group.deferred, started=group.started)
            parts.append(rest)
        self._requeue(group.claims)
        self._free += group.slots - len(group.finished)
        self._work.set()  # for the claims and the offsets, which are tried again without these outcomes
        for part in parts:
            part.settle(False)
            self._apart.add(part)
            self._tasks.create_task(self._record_apart(part))

    async def _record_apart(self, part: Group) -> None:
        """Commit it however long that takes: first in the queue for its lock, so that it wins before any new claim."""
        recorded = await self._database.patiently(partial(self._commit_waiting, part=part))
        self._step("recorded")
        part.settle()
        self._apart.discard(part)
        self._conclude(part, recorded)
        self._work.set()

    async def _commit_waiting(self, sql: Sql, part: Group) -> Recorded:
        if sql.dialect == "postgresql":
            await sql.fetch("SET lock_timeout = 0")
        return await self._commit_once(sql, part)

    def _requeue(self, claims: Sequence[tuple[Assignment, Candidate]]) -> None:
        """Put candidates back whose claim was not tried; those of a fenced partition are read again anyway."""
        self._give_back(candidate for _, candidate in claims)
        for assignment, candidate in reversed(claims):
            if not assignment.fenced:
                self._candidates[assignment].put_back(candidate)

    async def _commit_once(self, sql: Sql, group: Group) -> Recorded:
        advances, claims = [move for _, move, _ in group.advances], [c.row_id for _, c in group.claims]
        bare = _bare([c for _, c in group.claims])
        plain = not (group.refused or group.dead or group.deferred) and all(o.sent for o in group.outcomes)
        if sql.dialect == "postgresql" and plain:
            return await self._rows.record(sql, group.outcomes, advances, claims, bare)
        async with sql.transaction():
            if group.deferred:
                await self._rows.defer(sql, [(c.row_id, seconds) for _, c, seconds in group.deferred])
            exhausted = await self._rows.exhaust(sql, [c.row_id for _, c in group.refused])
            recorded = await self._rows.record(sql, group.outcomes, advances, claims, bare)
            recorded.failed.extend(exhausted)
            await lay(sql, [letter for _, _, letter in group.dead] + self._letters(group, recorded.failed))
        return recorded

    def _letters(self, group: Group, failed: Sequence[Row]) -> list[DeadLetter]:
        where = {w.claim.row_id: (w.assignment, w.entry) for w in group.finished}
        where |= {c.row_id: (a, c.entry) for a, c in group.refused}
        ended = [row for row in failed if row["status"] == "failed"]
        return [self._letter_of_row(*where[row["id"]], row, _reason(group, row)) for row in ended]

    def _letter_of_row(self, assignment: Assignment, entry: Entry, row: Row, reason: str) -> DeadLetter:
        return DeadLetter(
            self.processor.name,
            assignment.partition.stream,
            assignment.partition.index,
            reason,
            mask(row["error"] or ""),
            offset=entry.offset,
            message_key=row["row_key"],
            table_name=self.processor.table.name,
            row_id=row["id"],
            claim_no=row["claim_no"],
            attempts=row["attempts"],
            first_at=row["created_at"],
        )

    def _conclude(self, group: Group, recorded: Recorded) -> None:
        """The commit is done: slots are free, new claims start, final failures are reported."""
        self._metrics.committed(self.processor.name, clock() - group.started, len(group.finished))
        waiting = len(group.refused) + len(group.deferred)
        self._metrics.records(self.processor.name, len(group.finished), len(group.dead), waiting)
        if recorded.in_place:
            for assignment, _, last in group.advances:
                assignment.window.passed(last)
            self._start_claimed(group.claims, recorded.claimed, group.started, group.slots)
        else:
            for assignment, _, _ in group.advances:
                assignment.fence()
            self._requeue(group.claims)
            self._free += group.slots
        for work in group.finished:
            self._in_flight[work.assignment] -= 1
            if work.gate.holds_permit and self._permits is not None:
                self._permits.release()
        in_doubt = sum(work.gate.passed for work in self._group.finished)
        self._metrics.busy(self.processor.name, sum(self._in_flight.values()), in_doubt)
        self._report(group, recorded.failed)

    def _report(self, group: Group, failed: Sequence[Row]) -> None:
        errors = {w.claim.row_id: w.error for w in group.finished}
        ended = {row["id"]: row for row in failed}
        words = Counter(_outcome_word(work, ended.get(work.claim.row_id)) for work in group.finished)
        for word, count in words.items():
            self._metrics.acted(self.processor.name, word, count)
        for row in failed:
            if row["status"] != "failed":
                continue
            error = errors.get(row["id"]) or Reject(recovery.ATTEMPTS_USED_UP, row["error"] or "")
            log.error(
                "row.failed",
                processor=self.processor.name,
                row_id=row["id"],
                attempts=row["attempts"],
                held=row["held"],
            )
            self._metrics.dead_letter(self.processor.name, _reason(group, row))
            if self.processor.reports_failures:
                telemetry.capture_final_failure(
                    error, processor=self.processor.name, key=row["row_key"], row_id=row["id"]
                )

    # ---- the idle look

    async def _look(self, assignment: Assignment) -> None:
        """Every few seconds: has somebody moved, paused or resumed this processor?"""
        while True:
            await asyncio.sleep(self.limits.idle_look)
            try:
                await assignment.look()
            except Exception as error:
                log.warning("position.not_compared", stream=assignment.partition.name, error=type(error).__name__)
            self._metrics.lag(self.processor.name, assignment)
            if assignment.fenced and assignment.subscription is not None and not self._stopping:
                await assignment.subscription.restart()


def _of_row(entry: Entry, row: Row, lane: Callable[[Row], str]) -> Candidate:
    return Candidate(entry, row["id"], row["row_key"], None, lane(row), row["attempts"])


def _stored(columns: Mapping[str, object]) -> dict[str, object]:
    return {f"new_{name}": storable(value) if isinstance(value, str) else value for name, value in columns.items()}


def _reason(group: Group, row: Row) -> str:
    """Why a row has failed, as a code."""
    if row["held"]:
        return recovery.OUTCOME_UNKNOWN
    reasons = {outcome.row_id: outcome.reason for outcome in group.outcomes}
    return reasons.get(row["id"], recovery.ATTEMPTS_USED_UP)


def _outcome_word(work: Work, row: Row | None) -> str:
    if work.outcome is None:
        return "dropped"
    if work.outcome.sent:
        return "sent"
    return "failed" if row is not None and row["status"] == "failed" else "retry"


def _bare(candidates: Sequence[Candidate]) -> list[int]:
    """Those whose payload is here: the columns of their rows would be fetched for nothing."""
    return [candidate.row_id for candidate in candidates if candidate.payload is not None]
