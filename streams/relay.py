"""Due rows become messages: reserved, committed, then published; released again when the confirm does not come.

What is due, and what a mark says, is the table's own business (`Due`): rows that a processor acts upon live by the
protocol of `rows.py`, dead letters by a shorter one of theirs.

The relay selects by status and due time, never above the last id, so a late commit is not passed over. Its duplicates
die on the claim, so it publishes without deduplication. It wakes on NOTIFY and polls as a safety net; the database's
clock decides what is due.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from streams import offsets, telemetry
from streams.database import Dialect, dialect
from streams.errors import LogError
from streams.listener import Listener
from streams.log import Log, Partition, Publisher, route
from streams.message import Message
from streams.processor import Limits, RowTable
from streams.rows import Rows
from streams.sql import Database, KeptDatabase, Row, Sql

log = structlog.get_logger(__name__)


class Due(Protocol):
    """The due rows of one table. Rows have `id` and `row_key`; whose key is null are routed by their id."""

    @property
    def batch(self) -> int:
        """The most rows to reserve at once."""
        ...

    @property
    def confirms(self) -> bool:
        """Whether `confirm` has something to write."""
        ...

    async def reserve(self, sql: Sql, limit: int) -> list[Row]:
        """Mark rows that are due as being published, and return them."""
        ...

    async def expired(self, sql: Sql, limit: int) -> list[Row]:
        """Rows whose message should have arrived long ago, to be repeated where their partition is read promptly."""
        ...

    async def repeat(self, sql: Sql, ids: Sequence[int]) -> list[Row]:
        """Mark these again, if they are expired still."""
        ...

    async def release(self, sql: Sql, rows: Sequence[Row]) -> None:
        """These got no confirm: take our own marks away, and no newer ones."""
        ...

    async def confirm(self, sql: Sql, rows: Sequence[Row]) -> None:
        """These are stored in the stream."""
        ...


class Source(Protocol):
    """One table whose due rows go to a stream."""

    @property
    def stream(self) -> str: ...

    @property
    def wakes_on(self) -> str:
        """What a NOTIFY says that is meant for this table; an empty one is meant for all."""
        ...

    @property
    def reader(self) -> str:
        """The processor whose lag says whether a repeat would be of use."""
        ...

    def due(self, limits: Limits, dialect: Dialect) -> Due: ...

    def message(self, row: Row) -> Message:
        """The message for a row that was reserved."""
        ...


@dataclass(frozen=True, slots=True)
class Tail:
    """A `Source`: rows of a processor, for which `hint` builds the message that its `reader` gets."""

    table: RowTable
    stream: str
    reader: str
    hint: Callable[[Row], Message]

    @property
    def wakes_on(self) -> str:
        """The table's name."""
        return self.table.name

    def due(self, limits: Limits, dialect: Dialect) -> Due:
        """By the protocol of rows."""
        return Rows(self.table, limits, dialect)

    def message(self, row: Row) -> Message:
        """The hint."""
        return self.hint(row)


class Relay:
    """Tails one table."""

    def __init__(
        self,
        tail: Source,
        target: Log,
        engine: AsyncEngine,
        limits: Limits,
        metrics: telemetry.Metrics,
        step: Callable[[str], None] = lambda name: None,
        listener: Listener | None = None,
    ) -> None:
        """`listener` is shared with the other relays of the process, where there are any."""
        self.tail, self._log, self._engine = tail, target, engine
        self._limits = limits
        self._metrics, self._step = metrics, step
        self._due = tail.due(limits, dialect(engine))
        self._database = Database(engine, limits.database_away)
        self._kept = KeptDatabase(engine, limits.database_away)
        self._partitions: list[Partition] = []
        self._publishers: dict[int, Publisher] = {}
        self._listener = listener or Listener(engine)
        self._wake = asyncio.Event()
        self._repeat_at = 0.0

    async def run(self, stop: asyncio.Event) -> None:
        """Relay until `stop`."""
        self._partitions = await self._log.partitions(self.tail.stream)
        self._listener.add(self._wake, self.tail.wakes_on)
        stopping = asyncio.create_task(self._wake_at(stop))
        try:
            backoff = 0.5
            while not stop.is_set():
                self._wake.clear()
                try:
                    busy = await self.turn()
                    backoff = 0.5
                except LogError as error:
                    log.warning("relay.log_away", error=str(error) or type(error).__name__, again_in=backoff)
                    await self._pause(backoff)
                    backoff = min(backoff * 2, 30.0)
                else:
                    if not busy:
                        await self._pause(self._limits.relay_poll)
        finally:
            self._listener.remove(self._wake)
            stopping.cancel()
            for publisher in self._publishers.values():
                await publisher.close()
            await self._kept.close()

    async def turn(self) -> bool:
        """Reserve, commit, publish what is due now; True when a whole batch was due, so that there may be more."""
        rows = await self._kept.patiently(lambda sql: self._due.reserve(sql, self._due.batch))
        self._step("reserved")
        await self._publish(rows)
        if self._repeat_at <= (now := asyncio.get_running_loop().time()):
            self._repeat_at = now + self._limits.relay_poll  # no more often, however often it is woken
            await self._publish(await self._kept.patiently(self._repeat))
        return len(rows) == self._due.batch

    async def _repeat(self, sql: Sql) -> list[Row]:
        """Reserve again what should have arrived long ago, where its partition is read promptly."""
        expired = await self._due.expired(sql, self._due.batch)
        if not expired:
            return []
        prompt = await self._prompt_partitions(sql)
        return await self._due.repeat(sql, [row["id"] for row in expired if self._partition_of(row) in prompt])

    async def _prompt_partitions(self, sql: Sql) -> set[int]:
        prompt = set()
        for partition in self._partitions:
            position = await offsets.load(sql, self.tail.reader, partition)
            bounds = await self._log.bounds(partition)
            read_to = position.next_offset if position is not None else bounds.first
            if bounds.next - read_to < self._limits.repeat_lag_limit:
                prompt.add(partition.index)
        return prompt

    async def _publish(self, rows: Sequence[Row]) -> None:
        by_partition: dict[int, list[Row]] = defaultdict(list)
        for row in rows:
            by_partition[self._partition_of(row)].append(row)
        results = await asyncio.gather(
            *(self._publish_to(index, part) for index, part in by_partition.items()), return_exceptions=True
        )
        for error in results:
            if isinstance(error, BaseException):
                raise error

    async def _publish_to(self, index: int, rows: Sequence[Row]) -> None:
        try:
            if index not in self._publishers:
                self._publishers[index] = await self._log.publisher(self._partitions[index])
            await self._publishers[index].publish([self.tail.message(row).encode() for row in rows])
        except LogError:
            await self._database.patiently(lambda sql: self._due.release(sql, rows))
            raise
        self._step("published")
        if self._due.confirms:
            await self._database.patiently(lambda sql: self._due.confirm(sql, rows))
        self._metrics.relayed(self.tail.stream, len(rows))
        log.info("relay.published", stream=self.tail.stream, partition=index, rows=len(rows))

    def _partition_of(self, row: Row) -> int:
        return route(row["row_key"] or str(row["id"]), len(self._partitions))

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    async def _wake_at(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._wake.set()
