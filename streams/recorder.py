"""The recorder: commits what has gathered while its last commit ran, and alone moves a row processor's offsets.

A group holds outcomes, dead letters, the offsets that they settle, and the claims for the slots that become free: one
transaction, on PostgreSQL mostly one statement. There is one recorder in a process, so groups grow by themselves when
the database is slow (docs/decisions/0015-one-recorder.md).
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import structlog

from streams import recovery, telemetry
from streams.assignment import Assignment
from streams.database import is_away
from streams.dead_letters import lay
from streams.errors import Reject, Retry
from streams.group import Group, Work, letters, outcome_word, reason
from streams.lanes import Candidate, Waiting
from streams.processor import Claim, Records, clock
from streams.rows import Recorded, Rows
from streams.slots import Slots, bare
from streams.sql import Database, Row, Sql

log = structlog.get_logger(__name__)

LOCK_TIMEOUT_MS = 2000
"""How long the recorder waits for a row that somebody has locked before it records the others without it."""
LOCK_NOT_AVAILABLE = "55P03"


class Recorder:
    """Records for one row processor. `waiting` are its partitions, each with the candidates for free slots."""

    def __init__(
        self,
        slots: Slots,
        rows: Rows,
        database: Database,
        waiting: dict[Assignment, Waiting],
        metrics: telemetry.Metrics,
    ) -> None:
        self.processor, self._inbox, self._step = slots.processor, slots.inbox, slots.step
        self._slots, self._rows, self._database, self._waiting, self._metrics = slots, rows, database, waiting, metrics
        self._committing: Group | None = None
        self._apart: set[Group] = set()
        """Parts of a group that somebody's lock holds up."""
        self._tasks = asyncio.TaskGroup()
        self._progress = asyncio.Condition()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that a commit may bring about."""
        async with self._progress:
            await self._progress.wait_for(condition)

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """One connection, one commit after the other, each with all that has gathered meanwhile.

        What a lock holds up is recorded by further tasks of the group.
        """
        self._tasks = tasks
        while True:
            await self._inbox.filled.wait()
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
            await self._inbox.filled.wait()
            self._committing = self._gather() or None

    def _gather(self) -> Group:
        """What has ended since the last commit, the records that it settles, and claims for the slots that it frees."""
        group = self._inbox.take()
        group.deferred = self._deferred()
        group.settle()
        for assignment in self._waiting:
            if (move := assignment.advance()) is not None:
                group.advances.append((assignment, *move))
        finished = len(group.finished)
        self._slots.free += finished
        for work in group.finished:
            work.lane.give_back(work.claim.row_id, clock())
        group.claims = self._next_claims()
        # what the claims do not use stays taken until the outcomes are committed: a plan may not claim for it before
        self._slots.free -= max(0, finished - len(group.claims))
        group.slots = max(finished, len(group.claims))
        group.started = clock()
        return group

    def _deferred(self) -> list[tuple[Assignment, Candidate, float]]:
        """Whose provider is away: until it is probed, and but for the first some time later, not all at once."""
        now = clock()
        found = [(a, c, s) for a in self._waiting for c, s in self._waiting[a].deferred(now)]
        return [(a, c, s * (1 + random.random()) if n else s) for n, (a, c, s) in enumerate(found)]

    def _next_claims(self) -> list[tuple[Assignment, Candidate]]:
        """Candidates for the free slots, in turn from each partition, where their lanes have room."""
        claims: list[tuple[Assignment, Candidate]] = []
        queues = [(a, q) for a, q in self._waiting.items() if q and a.reading]
        while queues and self._slots.free:
            for assignment, waiting in list(queues):
                lane = waiting.next_lane(clock())
                if lane is None or not self._slots.reserve(assignment, 1):
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
            locked = getattr(error, "sqlstate", None) == LOCK_NOT_AVAILABLE
            if not locked and (is_away(error) or not group.done):
                raise
            self._part(group, "record.row_is_locked" if locked else "record.refused")
        else:
            self._step("recorded")
            self._database.answered()
            self._conclude(group, recorded)

    def _part(self, group: Group, why: str) -> None:
        """Somebody has locked a row of the group, or a position, or what belongs to one cannot be written: record each
        outcome by itself, and go on meanwhile.

        Only the locked one waits; its slot stays taken, and the offset stays before its record.
        """
        log.warning(why, processor=self.processor.name, outcomes=len(group.finished))
        parts = [Group(finished=[work], slots=1, started=group.started) for work in group.finished]
        if group.dead or group.refused or group.deferred:
            rest = Group(dead=group.dead, refused=group.refused, deferred=group.deferred, started=group.started)
            parts.append(rest)
        self._requeue(group.claims)
        self._slots.free += group.slots - len(group.finished)
        self._inbox.wake()  # for the claims and the offsets, which are tried again without these outcomes
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
        self._inbox.wake()

    async def _commit_waiting(self, sql: Sql, part: Group) -> Recorded:
        if sql.dialect == "postgresql":
            await sql.fetch("SET lock_timeout = 0")
        try:
            return await self._commit_once(sql, part)
        except Exception as error:
            if is_away(error) or not part.done:
                raise
            self._refuse(part.done[0], error)
        return await self._commit_once(sql, part)

    def _refuse(self, work: Work, error: Exception) -> None:
        """What belongs to this row cannot be written: an attempt that failed, though its act did not."""
        # not the error's text: it quotes the row
        log.error("record.refused", processor=self.processor.name, row_id=work.claim.row_id, error=type(error).__name__)
        if not isinstance(error, Retry | Reject):
            error = Retry(f"done, but what belongs to it could not be written: {type(error).__name__}")
        work.done, work.error = None, error
        work.outcome = self._slots.failure(work, error)

    def _requeue(self, claims: Sequence[tuple[Assignment, Candidate]]) -> None:
        """Put candidates back whose claim was not tried; those of a fenced partition are read again anyway."""
        self._slots.give_back(candidate for _, candidate in claims)
        for assignment, candidate in reversed(claims):
            if not assignment.fenced:
                self._waiting[assignment].put_back(candidate)

    async def _commit_once(self, sql: Sql, group: Group) -> Recorded:
        advances, claims = [move for _, move, _ in group.advances], [c.row_id for _, c in group.claims]
        known = bare([c for _, c in group.claims])
        extra = bool(group.refused or group.dead or group.deferred or group.done)
        plain = not extra and all(o.sent for o in group.outcomes)
        if sql.dialect == "postgresql" and plain:
            return await self._rows.record(sql, group.outcomes, advances, claims, known)
        async with sql.transaction():
            if group.deferred:
                await self._rows.defer(sql, [(c.row_id, seconds) for _, c, seconds in group.deferred])
            exhausted = await self._rows.exhaust(sql, [c.row_id for _, c in group.refused])
            if group.done:
                await self._record_what_belongs_to(sql, group.done)
            recorded = await self._rows.record(sql, group.outcomes, advances, claims, known)
            recorded.failed.extend(exhausted)
            await lay(sql, [letter for _, _, letter in group.dead] + letters(group, recorded.failed, self.processor))
        return recorded

    async def _record_what_belongs_to(self, sql: Sql, works: Sequence[Work]) -> None:
        """Before the outcomes, and for no row that is sent already: whoever has it in hand, its rows are written once.

        Of two claims of a row in one group the first counts.
        """
        unsent = await self._rows.lock_unsent(sql, [work.claim.row_id for work in works])
        done: dict[int, tuple[Claim, Mapping[str, object]]] = {}
        for work in works:
            if work.claim.row_id in unsent and work.done is not None:
                done.setdefault(work.claim.row_id, (work.claim, work.done))
        if done and isinstance(self.processor, Records):
            await self.processor.record(sql, list(done.values()))

    def _conclude(self, group: Group, recorded: Recorded) -> None:
        """The commit is done: slots are free, new claims start, final failures are reported."""
        self._metrics.committed(self.processor.name, clock() - group.started, len(group.finished))
        waiting = len(group.refused) + len(group.deferred)
        self._metrics.records(self.processor.name, len(group.finished), len(group.dead), waiting)
        if recorded.in_place:
            for assignment, _, last in group.advances:
                assignment.window.passed(last)
            self._slots.start_claimed(group.claims, recorded.claimed, group.started, group.slots)
        else:
            for assignment, _, _ in group.advances:
                assignment.fence()
            self._requeue(group.claims)
            self._slots.free += group.slots
        for work in group.finished:
            self._slots.committed(work)
        in_doubt = sum(work.gate.passed for work in self._inbox.group.finished)
        self._metrics.busy(self.processor.name, sum(self._slots.in_flight.values()), in_doubt)
        self._report(group, recorded.failed)

    def _report(self, group: Group, failed: Sequence[Row]) -> None:
        errors = {w.claim.row_id: w.error for w in group.finished}
        ended = {row["id"]: row for row in failed}
        words = Counter(outcome_word(work, ended.get(work.claim.row_id)) for work in group.finished)
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
            self._metrics.dead_letter(self.processor.name, reason(group, row))
            if self.processor.reports_failures:
                telemetry.capture_final_failure(
                    error, processor=self.processor.name, key=row["row_key"], row_id=row["id"]
                )

    def quiet(self, assignment: Assignment) -> bool:
        """Whether nothing of the assignment is in flight and all that is settled is committed."""
        if self._slots.in_flight[assignment] or assignment.advance() is not None:
            return False
        groups = [self._inbox.group, *self._apart] + ([] if self._committing is None else [self._committing])
        return not any(assignment in group.assignments() for group in groups)
