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

Here is what reads and plans; acting is in `slots.py`, recording and advancing in `recorder.py`, and what goes from one
to the other in `group.py`.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from streams import telemetry
from streams.assignment import KILLS_ITS_READER, MAX_ID, Assignment, Entry
from streams.breaker import Breaker
from streams.database import dialect, is_away
from streams.dead_letters import DeadLetter
from streams.errors import Reject, Undecodable
from streams.group import Inbox
from streams.lanes import Candidate, Lanes, Waiting
from streams.log import Log, Record
from streams.masking import mask
from streams.message import decode
from streams.processor import Limits, NewRow, RowProcessor, RowRef, clock
from streams.recorder import Recorder
from streams.rows import Rows
from streams.slots import Slots, Step, bare
from streams.sql import Database, KeptDatabase, Row, Sql, storable

log = structlog.get_logger(__name__)


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
        self._engine, self._database = engine, Database(engine, limits.database_away)
        self._planning: dict[Assignment, KeptDatabase] = {}
        self._rows = Rows(processor.table, limits, dialect(engine))
        self._lane_is_read = lanes is None or {*processor.table.known} <= {*processor.table.read}
        """Whether what a claim returns tells the lane."""
        self._assignments: list[Assignment] = []
        self._waiting: dict[Assignment, Waiting] = {}
        """For each partition the records whose rows may be claimed as soon as a slot is free."""
        self._inbox = Inbox()
        self._slots = Slots(processor, limits, metrics, self._inbox, step, lanes)
        self._recorder = Recorder(self._slots, self._rows, self._database, self._waiting, metrics)

    @property
    def breaker(self) -> Breaker:
        """That of the provider; of the only one, where the processor has no lanes."""
        return self._slots.breaker

    # ---- life

    async def run(self, stop: asyncio.Event) -> None:
        """Read, claim, act and record until `stop`; then finish what is in flight, record it, and close."""
        try:
            await self._run(stop)
        finally:
            self._slots.cancel()
            for database in self._planning.values():
                await database.close()

    async def _run(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._recorder.run(tasks))]
            if self._slots.roads.lanes is None:
                background.append(tasks.create_task(self._slots.watch_provider(self._slots.roads[""])))
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
        self._waiting[assignment] = Waiting(self._slots.roads)
        self._planning[assignment] = KeptDatabase(self._engine, self.limits.database_away)
        return assignment

    async def _finish_all(self) -> None:
        self._slots.closed = True
        in_flight = sum(self._slots.in_flight.values())
        log.info("processor.stopping", processor=self.processor.name, in_flight=in_flight)
        for assignment in self._assignments:
            async with assignment.turn:
                await self._finish(assignment)

    async def _finish(self, assignment: Assignment) -> None:
        """Wait until nothing of the assignment is in flight and its settled records are committed; forget the rest."""
        self._waiting[assignment].clear()
        self._inbox.wake()
        await self._recorder.until(lambda: self._recorder.quiet(assignment))
        await assignment.ended()

    def _changed(self, assignment: Assignment) -> None:
        if assignment.fenced:
            self._waiting[assignment].clear()
        self._inbox.wake()

    # ---- take, decode, plan

    async def _feed(self, assignment: Assignment) -> None:
        while not self._slots.closed:
            await asyncio.sleep(0)  # with records at hand nothing below need wait: it would hold the loop, and the stop
            await assignment.readable()
            await self._room(assignment)
            if assignment.subscription is not None:
                await assignment.subscription.ready()
            async with assignment.turn:
                if assignment.reading and not self._slots.closed:
                    await self._turn(assignment)

    async def _room(self, assignment: Assignment) -> None:
        """Wait until the next turn is wanted: planned ahead while this one is sent, and memory stays bounded."""
        ahead, behind = self.limits.turn_records // 2, self.limits.turn_records * 10

        def room() -> bool:
            if assignment.isolated:
                return not assignment.window.entries
            # a lane that is full must not keep the others' records from being read
            near = self._slots.roads.lanes is not None or len(self._waiting[assignment]) <= ahead
            return near and len(assignment.window.entries) < behind

        await self._recorder.until(room)

    async def _turn(self, assignment: Assignment) -> None:
        """One turn up to the plan; acting and recording go on by themselves."""
        records = assignment.take(1 if assignment.isolated else self.limits.turn_records)
        if not records:
            return
        entries = [assignment.enter(record) for record in records]
        database = self._planning[assignment]
        starts = await database.patiently(assignment.begin) if assignment.counts else 0
        self._step("taken")
        if starts > KILLS_ITS_READER + 1:
            self._lay_to_rest(
                assignment, entries[0], records[0], "kills_its_reader", f"{starts - 1} starts ended at this record"
            )
            records, entries = records[1:], entries[1:]
        planned = await self._decode(assignment, records, entries)
        self._step("decoded")
        await database.patiently(lambda sql: self._plan_safely(sql, assignment, planned))
        self._step("planned")
        self._inbox.wake()

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
        """Insert what is new and claim for free slots, in one transaction; what is not claimable is settled.

        Of hints alone nothing but the claim is written, so they need no transaction.
        """
        hints = not assignment.isolated and all(isinstance(row, RowRef) for _, _, row in planned)
        reserved = self._slots.reserve(assignment, len(planned))
        if hints and self._lane_is_read and 0 < len(planned) <= reserved and self._slots.roads.hold(reserved):
            await self._claim_at_once(sql, assignment, planned, reserved)
            return
        t0 = clock()
        claimed: list[Row] = []
        chosen: list[Candidate] = []
        try:
            async with nullcontext() if hints else sql.transaction():
                candidates = await self._insert_and_look(sql, planned)
                chosen, rest = self._slots.choose(candidates, reserved)
                claimed = await self._rows.claim(sql, [c.row_id for c in chosen], bare(chosen))
                await assignment.begun(sql)
        except BaseException:
            self._slots.free += reserved
            self._slots.give_back(chosen)
            raise
        waiting = {id(candidate.entry) for candidate in candidates}
        for entry, _, _ in planned:
            entry.settled = id(entry) not in waiting
        self._slots.start_claimed([(assignment, c) for c in chosen], claimed, t0, reserved)
        self._waiting[assignment].extend(rest)

    async def _claim_at_once(
        self, sql: Sql, assignment: Assignment, planned: Sequence[tuple[Entry, Record, NewRow | RowRef]], reserved: int
    ) -> None:
        """Few hints, and room for all of them in every lane: claim without a look, in one statement.

        What could not be claimed goes the way of every refused claim: the recorder looks why, and settles it.
        """
        entries: dict[int, Entry] = {}
        for entry, _, row in planned:
            if isinstance(row, RowRef):
                entry.settled = entries.setdefault(row.row_id, entry) is not entry
        t0 = clock()
        try:
            claimed = await self._rows.claim(sql, list(entries))
        except BaseException:
            self._slots.free += reserved
            raise
        finally:
            self._slots.roads.release(reserved)
        self._slots.start_unasked(assignment, entries, claimed, t0, reserved)

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
        lane = self._slots.roads.of
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
        self._inbox.dead(assignment, entry, letter)

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
            if assignment.fenced and assignment.subscription is not None and not self._slots.closed:
                await assignment.subscription.restart()


def _of_row(entry: Entry, row: Row, lane: Callable[[Row], str]) -> Candidate:
    return Candidate(entry, row["id"], row["row_key"], None, lane(row), row["attempts"])
