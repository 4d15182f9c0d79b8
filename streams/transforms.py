"""One turn of a transform: records in, messages out, exactly once; see `runtime.py` for the processors that act.

    take -> transform -> publish, until every message is confirmed -> record and advance, in one transaction

The publishing ids come from the source's offsets, so a crash between publish and commit repeats nothing: the broker
drops what it has under the same name. The name carries the epoch, so a deliberate replay is not swallowed.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from streams import offsets, telemetry
from streams.assignment import KILLS_ITS_READER, MAX_ID, Assignment, Entry
from streams.dead_letters import DeadLetter, lay
from streams.errors import Reject, Undecodable
from streams.log import Log, Partition, Publisher, Record
from streams.masking import mask
from streams.message import decode
from streams.processor import Limits, Transform, Transformed
from streams.sql import Database, Sql, storable

log = structlog.get_logger(__name__)

TURN_BYTES = 4 * 1024 * 1024
"""A turn of large records is cut here: memory is bounded by it, whatever the backlog."""


class _Fenced(Exception):
    """The offset did not move: another epoch or owner. What the turn counted is rolled back."""


@dataclass(slots=True)
class _Result:
    """One record of a turn: what it becomes, or the dead letter that it is."""

    entry: Entry
    record: Record
    transformed: Transformed | None = None
    dead: DeadLetter | None = None


class TransformRuntime:
    """Runs one transform over all partitions of its stream, in one process."""

    def __init__(
        self,
        transform: Transform,
        source: Log,
        engine: AsyncEngine,
        limits: Limits,
        metrics: telemetry.Metrics,
        step: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.transform, self.limits = transform, limits
        self._log, self._metrics, self._step = source, metrics, step
        self._database = Database(engine, limits.database_away)
        self._assignments: list[Assignment] = []
        self._targets: list[Partition] = []
        self._publishers: dict[tuple[int, int], tuple[str, Publisher]] = {}
        """By source and target partition: the publisher and its name."""
        self._stopping = False

    async def run(self, stop: asyncio.Event) -> None:
        """Read, transform, publish and advance until `stop`; then end the turn under way and close."""
        self._targets = await self._log.partitions(self.transform.target)
        async with asyncio.TaskGroup() as tasks:
            background = []
            for partition in await self._log.partitions(self.transform.stream):
                assignment = Assignment(
                    self.transform.name, partition, self._log, self._database.open, finish=self._nothing_in_flight
                )
                self._assignments.append(assignment)
                assignment.subscription = await self._log.subscribe(partition, self.transform.name, assignment)
                background.append(tasks.create_task(self._feed(assignment)))
                background.append(tasks.create_task(self._look(assignment)))
            await stop.wait()
            await self._finish_turns()
            for task in background:
                task.cancel()
        for assignment in self._assignments:
            if assignment.subscription is not None:
                await assignment.subscription.close()
        for _, publisher in self._publishers.values():
            await publisher.close()

    async def _nothing_in_flight(self, assignment: Assignment) -> None:
        """A turn ends with its commit: whoever holds the turn's lock has nothing in flight."""

    async def _finish_turns(self) -> None:
        self._stopping = True
        log.info("processor.stopping", processor=self.transform.name)
        for assignment in self._assignments:
            async with assignment.turn:
                pass

    async def _feed(self, assignment: Assignment) -> None:
        while not self._stopping:
            await asyncio.sleep(0)  # with records at hand nothing below need wait: it would hold the loop, and the stop
            await assignment.readable()
            if assignment.subscription is not None:
                await assignment.subscription.ready()
            async with assignment.turn:
                if assignment.reading and not self._stopping:
                    await self._turn(assignment)

    async def _turn(self, assignment: Assignment) -> None:
        """One turn of this partition, from its records to the offset behind them."""
        records = self._take(assignment)
        if not records:
            return
        results = [_Result(assignment.enter(record), record) for record in records]
        starts = await self._database.patiently(assignment.begin) if assignment.counts else 0
        self._step("taken")
        if starts > KILLS_ITS_READER + 1:
            self._lay_to_rest(assignment, results[0], "kills_its_reader", f"{starts - 1} starts ended at this record")
        for result in results:
            if result.dead is None:
                await self._transform(assignment, result)
        self._step("transformed")
        await self._publish(assignment, results)
        self._step("published")
        await self._record(assignment, results)
        self._step("recorded")

    def _take(self, assignment: Assignment) -> list[Record]:
        """Record by record, up to the limits of number and size; what is not taken stays in the subscription."""
        taken: list[Record] = []
        size, limit = 0, 1 if assignment.isolated else self.limits.turn_records
        while len(taken) < limit and size < TURN_BYTES:
            one = assignment.take(1)
            if not one:
                break
            taken += one
            size += len(one[0].data)
        return taken

    async def _transform(self, assignment: Assignment, result: _Result) -> None:
        try:
            message = decode(result.record.data)
            result.entry.record_id = storable(message.id, MAX_ID)
            for step in self.transform.transform(message, result.record.offset, len(self._targets)):
                result.transformed = step
                await asyncio.sleep(0)  # a long record must not hold the loop
        except Undecodable as error:
            self._lay_to_rest(assignment, result, "undecodable", str(error))
        except Reject as error:
            self._lay_to_rest(assignment, result, error.reason, error.error)
        except Exception as error:  # a fault of ours in one record must not stop the others
            log.exception("record.not_transformed", stream=assignment.partition.name, offset=result.record.offset)
            self._lay_to_rest(assignment, result, "unexpected_error", type(error).__name__)

    async def _publish(self, assignment: Assignment, results: Sequence[_Result]) -> None:
        """To each target partition in the order of the ids, and wait for every confirm."""
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(self._targets)):
                outgoing = [pair for r in results if r.transformed for pair in r.transformed.outgoing[index]]
                if outgoing:
                    tasks.create_task(self._publish_to(assignment, index, outgoing))

    async def _publish_to(self, assignment: Assignment, index: int, outgoing: Sequence[tuple[int, bytes]]) -> None:
        publisher = await self._publisher(assignment, index)
        await publisher.publish([data for _, data in outgoing], [publishing_id for publishing_id, _ in outgoing])

    async def _publisher(self, assignment: Assignment, index: int) -> Publisher:
        """The publisher to one target partition. A replay has a new name; the publisher of the old one is let go."""
        source = assignment.partition.index
        name = self.transform.publisher_name(source, self._epoch(assignment))
        known = self._publishers.pop((source, index), None)
        if known is not None and known[0] != name:
            await known[1].close()
            known = None
        if known is None:
            known = (name, await self._log.publisher(self._targets[index], name))
        self._publishers[source, index] = known
        return known[1]

    async def _record(self, assignment: Assignment, results: Sequence[_Result]) -> None:
        """Count, lay the dead to rest and advance; all of it is rolled back when the offset is not where we left it."""
        for result in results:
            result.entry.settled = True
        move = assignment.advance()
        if move is None:
            return  # the position was moved in mid-turn, and somebody has noticed: nothing of this turn counts
        done = [r for r in results if r.transformed is not None]

        async def commit(sql: Sql) -> None:
            async with sql.transaction():
                if not await offsets.advance(sql, [move[0]]):
                    raise _Fenced
                letters = await self.transform.record(
                    sql, [r.record for r in done], assignment.partition, [r.transformed for r in done if r.transformed]
                )
                await lay(sql, [*letters, *(r.dead for r in results if r.dead is not None)])
                await assignment.begun(sql)

        try:
            await self._database.patiently(commit)
        except _Fenced:
            assignment.fence()
        else:
            assignment.window.passed(move[1])
            self._metrics.records(self.transform.name, len(done), len(results) - len(done))

    def _lay_to_rest(self, assignment: Assignment, result: _Result, reason: str, error: str) -> None:
        p, record = assignment.partition, result.record
        result.dead = DeadLetter(
            self.transform.name, p.stream, p.index, reason, mask(error), offset=record.offset, body=record.data
        )
        result.transformed = None
        log.error("record.dead", stream=p.name, offset=record.offset, reason=reason)

    def _epoch(self, assignment: Assignment) -> int:
        return assignment.position.epoch if assignment.position is not None else 0

    async def _look(self, assignment: Assignment) -> None:
        """Every few seconds: has somebody moved, paused or resumed this processor?"""
        while True:
            await asyncio.sleep(self.limits.idle_look)
            try:
                await assignment.look()
            except Exception as error:
                log.warning("position.not_compared", stream=assignment.partition.name, error=type(error).__name__)
            self._metrics.lag(self.transform.name, assignment)
            if assignment.fenced and assignment.subscription is not None and not self._stopping:
                await assignment.subscription.restart()
