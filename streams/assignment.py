"""One partition as this process works on it: whether it is ours, where we read, which records are settled.

It is the engine's side of a subscription (`log.Owner`): it finishes and commits before it gives a partition up, and
it loads the saved position before it reads. It knows nothing of what is done with the records; `runtime.py` and
`transforms.py` do that.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import structlog

from streams import offsets
from streams.log import Bounds, Log, Partition, Record, Subscription
from streams.offsets import Advance, Position
from streams.sql import Sql

OpenSql = Callable[[], AbstractAsyncContextManager[Sql]]
"""Opens a connection for statements of this module; put back at the end of the block."""

KILLS_ITS_READER = 3
"""After so many starts without progress records are read one by one, and the next that kills is a dead letter."""

ISOLATED_RECORDS = 500
"""How many records are read one by one before all is taken to be well again: a turn's worth."""

MAX_ID = 200
"""Characters of a message's id that are kept beside the offset, for people."""

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Entry:
    """A record that was read. Settled: it has an outcome, or its row waits for a time or for somebody else."""

    offset: int
    timestamp_ms: int
    record_id: str = ""
    settled: bool = False


@dataclass(slots=True)
class Window:
    """Records read and not yet passed by the offset, in order. Pure: the longest settled prefix decides."""

    next_offset: int
    entries: deque[Entry] = field(default_factory=deque)

    def settled_prefix(self) -> Entry | None:
        """The last record that the offset may pass now, None if it has to stay."""
        last = None
        for entry in self.entries:
            if not entry.settled:
                break
            last = entry
        return last

    def passed(self, last: Entry) -> None:
        """The offset was moved past `last`: forget it and all before."""
        while self.entries and self.entries[0].offset <= last.offset:
            self.entries.popleft()
        self.next_offset = last.offset + 1


class Assignment:
    """One partition of a processor in this process."""

    def __init__(
        self,
        processor: str,
        partition: Partition,
        source: Log,
        open_sql: OpenSql,
        *,
        finish: Callable[["Assignment"], Awaitable[None]],
        changed: Callable[["Assignment"], None] = lambda assignment: None,
    ) -> None:
        """`finish` waits until nothing of the assignment is in flight and all outcomes are committed."""
        self.processor, self.partition = processor, partition
        self._log, self._open_sql, self._finish, self._changed = source, open_sql, finish, changed
        self.subscription: Subscription | None = None
        self.turn = asyncio.Lock()
        """Held from taking records to their plan's commit: an owner that changes waits for it."""
        self.position: Position | None = None
        self.window = Window(0)
        self.active = False
        self.fenced = False
        self.isolated = 0
        """How many records are still to be read one by one, after starts without progress."""
        self._counted_at: int | None = None
        """Where the offset stood when this start was counted; None before its first turn."""
        self.bounds: Bounds | None = None
        self._readable = asyncio.Event()
        self._expected_ms: int | None = None
        self._skip_to = 0
        self._next_read = 0
        self._gaps: set[tuple[int, int]] = set()
        """Jumps of the offset that were seen once, before the bounds were asked again."""

    # ---- what the engine asks

    @property
    def reading(self) -> bool:
        """Whether records may be taken and claimed now."""
        position = self.position
        return (
            self.active
            and not self.fenced
            and position is not None
            and not position.paused
            and not position.halted_reason
        )

    async def readable(self) -> None:
        """Wait until records may be taken."""
        while not self.reading:
            self._readable.clear()
            await self._readable.wait()

    def take(self, limit: int) -> list[Record]:
        """Records after the saved position, checked against what was last read at the position before it."""
        if not self.reading or self.subscription is None:
            return []
        records = self.subscription.take(limit)
        if records and self._jumped(records):
            return []
        if records and self._expected_ms is not None:
            self._compare(records[0])
        return [record for record in records if record.offset >= self._skip_to] if self.reading else []

    def enter(self, record: Record) -> Entry:
        """Put a record that was taken into the window."""
        entry = Entry(record.offset, record.timestamp_ms)
        self.window.entries.append(entry)
        return entry

    def advance(self) -> tuple[Advance, Entry] | None:
        """The move of the offset that the settled records allow, None if there is none."""
        last = self.window.settled_prefix() if not self.fenced and self.position is not None else None
        if last is None or self.position is None:
            return None
        p = self.partition
        was, era = self.window.next_offset, self.position.epoch
        moved = Advance(
            self.processor, p.stream, p.index, was, last.offset + 1, era, last.record_id, last.timestamp_ms, self._begun
        )
        return moved, last

    def fence(self, event: str = "position.moved_by_someone_else") -> None:
        """The saved row is not where we left it: claim nothing more, finish what is in flight, then load anew."""
        if not self.fenced:
            log.warning(event, stream=self.partition.name)
            self.fenced = True
            self._changed(self)

    # A record that kills its reader in decode or plan leaves nothing behind but a start that has not moved the offset.
    # So a start is counted once, before its first turn, and no longer when the offset moves (`advance` carries it
    # along) or when all was finished in order. No write for each turn: where the offset moves, each start is nearer to
    # the record that kills, and ends there; where it does not move, each start counts, however many turns were planned
    # before that record. What is not counted is the death in a later turn than the first, so it may take one more.
    # Who reads alone counts each record and takes it back with its plan: what kills in act is no matter of this.

    @property
    def counts(self) -> bool:
        """Whether the next turn is to be counted with `begin`."""
        return self.isolated > 0 or self._counted_at is None

    async def begin(self, sql: Sql) -> int:
        """Records were taken: count this start; returns how many have made no progress. See `KILLS_ITS_READER`."""
        self._counted_at = self.window.next_offset
        return await offsets.begin(sql, self.processor, self.partition)

    async def begun(self, sql: Sql) -> None:
        """The plan of a record that is read alone is committed, or about to be: it does not kill its reader."""
        if self.isolated:
            self.isolated -= 1
            await self._not_counted(sql)

    async def ended(self) -> None:
        """All is finished in order: a start that has not moved the offset is no sign of anything."""
        if self._counted_at != self.window.next_offset or self.isolated or self.fenced:
            return
        self._counted_at = None
        try:
            async with self._open_sql() as sql:
                await self._not_counted(sql)
        except Exception as error:  # no reason to stay; at worst records are read one by one for a while
            log.warning("position.start_stays_counted", stream=self.partition.name, error=type(error).__name__)

    @property
    def _begun(self) -> int:
        return KILLS_ITS_READER if self.isolated else 0

    async def _not_counted(self, sql: Sql) -> None:
        await offsets.begun(sql, self.processor, self.partition, self._begun)

    async def look(self) -> None:
        """Compare the saved row with ours: a replay, a pause or a resume is noticed without a restart."""
        self.bounds = await self._log.bounds(self.partition)
        async with self._open_sql() as sql:
            await offsets.observe(sql, self.processor, self.partition, self.bounds)
            saved = await offsets.load(sql, self.processor, self.partition)
        if saved is None or self.position is None or not self.active:
            return
        # a halt that was wiped out by hand is judged anew: reading on from here would be the jump it prevents
        moved = saved.epoch != self.position.epoch or saved.halted_reason != self.position.halted_reason
        if moved or (not self.window.entries and saved.next_offset > self.window.next_offset):
            self.fence()
        elif saved.paused != self.position.paused:
            self.position = saved
            log.info("processor.paused" if saved.paused else "processor.resumed", reason=saved.paused_reason)
            self._wake()

    # ---- log.Owner

    async def activate(self, partition: Partition) -> int:
        """Finish what a former activation left, load the position, and answer where to read."""
        await self.deactivate(partition)
        delay = 0.2
        while True:
            try:
                return await self._load()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                log.warning("position.not_loaded", stream=partition.name, error=repr(error), again_in=delay)
                await asyncio.sleep(delay)
                delay = min(delay * 2, 5.0)

    async def deactivate(self, partition: Partition) -> None:  # noqa: ARG002 - of the Protocol
        """Stop, and wait for the turn under way and for all that is in flight."""
        self.active = False
        async with self.turn:
            await self._finish(self)

    # ---- its own

    async def _load(self) -> int:
        self.bounds = bounds = await self._log.bounds(self.partition)
        async with self._open_sql() as sql:
            position = await offsets.load(sql, self.processor, self.partition)
            if position is None:
                await offsets.create(sql, self.processor, self.partition, bounds.first)
                position = await offsets.load(sql, self.processor, self.partition)
            if position is None:
                raise LookupError("the row of processor_offsets was deleted while it was read")
            self._adopt(position)
            reason = unreadable(position, bounds)
            if reason != position.halted_reason:
                await offsets.halt(sql, self.processor, self.partition, reason, position.epoch)
                self.position = await offsets.load(sql, self.processor, self.partition)
        if reason:
            log.error("partition.halted", stream=self.partition.name, reason=reason)
            return bounds.next
        self._wake()
        # the record before the position comes along when it is still there: it tells whether this is the stream we knew
        known = position.last_timestamp_ms is not None and position.next_offset > bounds.first
        self._expected_ms = position.last_timestamp_ms if known else None
        self._next_read = position.next_offset - 1 if known else position.next_offset
        return self._next_read

    def _adopt(self, position: Position) -> None:
        self.position, self.window = position, Window(position.next_offset)
        self.fenced, self.active, self._skip_to, self._expected_ms = False, True, position.next_offset, None
        self._counted_at = None
        self.isolated = ISOLATED_RECORDS if position.starts >= KILLS_ITS_READER else 0
        if self.isolated:
            log.error("partition.reads_one_by_one", stream=self.partition.name, starts_without_progress=position.starts)

    def _jumped(self, records: Sequence[Record]) -> bool:
        """Whether records are missing before or among these; then the position is loaded and judged anew.

        Offsets have harmless gaps. This one is harmless if the position can still be read and it is there again.
        """
        due, self._next_read = self._next_read, records[-1].offset + 1
        if self._next_read - due == len(records):
            return False
        offsets_read = [due - 1, *(record.offset for record in records)]
        gaps = {(a, b) for a, b in pairwise(offsets_read) if b > a + 1}
        if gaps <= self._gaps:
            self._gaps -= gaps
            return False
        self._gaps |= gaps
        self.fence("partition.offset_jumped")
        return True

    def _compare(self, record: Record) -> None:
        expected, self._expected_ms = self._expected_ms, None
        if record.offset == self._skip_to - 1 and record.timestamp_ms != expected and self.position is not None:
            reason = f"the record at {record.offset} is not the one that was read there: the stream was made anew"
            self.position = replace(self.position, halted_reason=reason)
            log.error("partition.halted", stream=self.partition.name, reason=reason)
            self._halting = asyncio.ensure_future(self._halt(reason, self.position.epoch))

    async def _halt(self, reason: str, epoch: int) -> None:
        async with self._open_sql() as sql:
            await offsets.halt(sql, self.processor, self.partition, reason, epoch)

    def _wake(self) -> None:
        self._readable.set()
        self._changed(self)


def unreadable(position: Position, bounds: Bounds) -> str | None:
    """Why reading from the position would silently jump; None when it would not. A person decides, by a replay."""
    if position.next_offset < bounds.first:
        missing = bounds.first - position.next_offset
        return f"retention overtook the reader: up to {missing} records from {position.next_offset} on are gone"
    if position.next_offset > bounds.next:
        return f"the stream ends at {bounds.next}, before the saved {position.next_offset}: it was made anew"
    return None
