"""One partition as its process works on it: what the offset may pass, where it reads, when it must not."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams import assignment as module
from streams.assignment import ISOLATED_RECORDS, KILLS_ITS_READER, Assignment, Entry, Window, unreadable
from streams.log import Bounds, Log, Partition, Record, Subscription
from streams.offsets import Position
from streams.sql import Sql
from streams.testing import eventually

PARTITION = Partition("recipients", 0, "recipients-0")
FRESH = Position(0, 0, False, None, None, 0, None)


# ---- the window


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=40), st.integers(0, 1000))
def test_the_offset_may_pass_the_longest_settled_prefix(steps: list[tuple[int, bool]], start: int) -> None:
    """Whatever the order in which records settle, and although offsets have gaps."""
    window, offset = Window(start), start - 1
    for gap, settled in steps:
        offset += gap
        window.entries.append(Entry(offset, 0, settled=settled))
    prefix: list[Entry] = []
    for entry in window.entries:
        if not entry.settled:
            break
        prefix.append(entry)
    last = window.settled_prefix()
    assert last is (prefix[-1] if prefix else None)
    if last is not None:
        window.passed(last)
        assert window.next_offset == last.offset + 1
        assert window.settled_prefix() is None
    assert len(window.entries) == len(steps) - len(prefix)


@pytest.mark.parametrize(
    ("next_offset", "bounds", "words"),
    [
        (5, Bounds(5, 5), None),
        (5, Bounds(0, 9), None),
        (0, Bounds(0, 0), None),
        (4, Bounds(5, 9), "retention"),
        (10, Bounds(0, 9), "made anew"),
        (10, Bounds(12, 12), "retention"),
    ],
)
def test_a_position_is_unreadable_when_reading_there_would_jump(
    next_offset: int, bounds: Bounds, words: str | None
) -> None:
    """Below what is still stored, or beyond the end."""
    reason = unreadable(replace(FRESH, next_offset=next_offset), bounds)
    assert reason is None if words is None else words in str(reason)


# ---- an assignment with everything around it made up


class Around:
    """The saved row, the log's bounds, the subscription's records, and what the assignment did to them."""

    def __init__(self) -> None:
        self.saved: Position | None = None
        self.bounds_now = Bounds(0, 100)
        self.records: list[Record] = []
        self.failures = 0
        self.finished = 0
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self.observed: list[Bounds] = []

    # streams.offsets

    async def load(self, sql: Sql, processor: str, partition: Partition) -> Position | None:
        if self.failures:
            self.failures -= 1
            raise ConnectionRefusedError
        return self.saved

    async def create(self, sql: Sql, processor: str, partition: Partition, first: int) -> None:
        self.saved = replace(FRESH, next_offset=first)

    async def halt(self, sql: Sql, processor: str, partition: Partition, reason: str | None, epoch: int) -> None:
        assert self.saved is not None
        if self.saved.epoch == epoch:
            self.saved = replace(self.saved, halted_reason=reason)

    async def observe(self, sql: Sql, processor: str, partition: Partition, bounds: Bounds) -> None:
        self.observed.append(bounds)

    async def begin(self, sql: Sql, processor: str, partition: Partition) -> int:
        assert self.saved is not None
        self.saved = replace(self.saved, starts=self.saved.starts + 1)
        return self.saved.starts

    async def begun(self, sql: Sql, processor: str, partition: Partition, starts: int) -> None:
        assert self.saved is not None
        self.saved = replace(self.saved, starts=starts)

    # streams.log

    async def bounds(self, partition: Partition) -> Bounds:
        return self.bounds_now

    def take(self, limit: int) -> list[Record]:
        taken, self.records = self.records[:limit], self.records[limit:]
        return taken

    # the engine

    @asynccontextmanager
    async def open_sql(self) -> AsyncIterator[Sql]:
        yield cast(Sql, None)

    async def finish(self, assignment: Assignment) -> None:
        await self.may_finish.wait()
        self.finished += 1


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> Around:
    """In place of the real ones."""
    around = Around()
    monkeypatch.setattr(module, "offsets", around)
    return around


@pytest.fixture
def mine(around: Around) -> Assignment:
    """An assignment of the mailer."""
    assignment = Assignment("mailer", PARTITION, cast(Log, around), around.open_sql, finish=around.finish)
    assignment.subscription = cast(Subscription, SimpleNamespace(take=around.take))
    return assignment


def enter(assignment: Assignment, offsets: Sequence[int], settled: bool = True) -> list[Entry]:
    """Put records with these offsets into the window."""
    entries = [assignment.enter(Record(offset, 1000 + offset, b"")) for offset in offsets]
    for entry in entries:
        entry.settled = settled
    return entries


async def test_the_first_start_begins_at_the_first_stored_record(mine: Assignment, around: Around) -> None:
    """Wherever retention has left the beginning."""
    around.bounds_now = Bounds(40, 100)
    assert await mine.activate(PARTITION) == 40
    assert mine.reading
    assert mine.window.next_offset == 40


async def test_the_record_before_the_position_is_read_along(mine: Assignment, around: Around) -> None:
    """It tells whether this is the stream that we knew, and is not handed out."""
    around.saved = replace(FRESH, next_offset=7, last_timestamp_ms=66)
    assert await mine.activate(PARTITION) == 6
    around.records = [Record(6, 66, b"old"), Record(7, 70, b"new")]
    assert [record.offset for record in mine.take(10)] == [7]


async def test_a_record_that_is_another_than_before_halts(mine: Assignment, around: Around) -> None:
    """Same offset, other time: the stream was made anew. Nothing is handed out, and the row says why."""
    around.saved = replace(FRESH, next_offset=7, last_timestamp_ms=66)
    await mine.activate(PARTITION)
    around.records = [Record(6, 67, b"other"), Record(7, 70, b"new")]
    assert mine.take(10) == []
    assert not mine.reading
    await eventually(lambda: _assert(around.saved is not None and "made anew" in str(around.saved.halted_reason)))


def _assert(condition: bool) -> None:
    assert condition


async def test_a_gap_between_records_is_judged_before_it_is_passed(mine: Assignment, around: Around) -> None:
    """Offsets have harmless gaps: one that is there again, while the position can be read, is passed."""
    await mine.activate(PARTITION)
    records = [Record(0, 0, b""), Record(3, 0, b"")]
    around.records = list(records)
    assert mine.take(10) == []
    assert mine.fenced
    await mine.activate(PARTITION)
    around.records = list(records)
    assert mine.take(10) == records


async def test_a_gap_that_retention_made_in_mid_read_halts(mine: Assignment, around: Around) -> None:
    """It fell behind while it was reading: what is gone is never passed over without a word."""
    await mine.activate(PARTITION)
    around.bounds_now = Bounds(50, 100)
    around.records = [Record(50, 0, b"")]
    assert mine.take(10) == []
    await mine.activate(PARTITION)
    assert around.saved is not None
    assert "retention" in str(around.saved.halted_reason)


async def test_nothing_before_the_position_is_compared_when_it_is_not_stored_any_more(
    mine: Assignment, around: Around
) -> None:
    """Retention ends exactly at the position: nothing is missing."""
    around.bounds_now = Bounds(7, 100)
    around.saved = replace(FRESH, next_offset=7, last_timestamp_ms=66)
    assert await mine.activate(PARTITION) == 7
    around.records = [Record(7, 70, b"new")]
    assert len(mine.take(10)) == 1


async def test_an_unreadable_position_halts_and_reads_nothing(mine: Assignment, around: Around) -> None:
    """The answer is the end, so that nothing comes; a position that has become readable is read again."""
    around.bounds_now = Bounds(9, 100)
    around.saved = replace(FRESH, next_offset=7)
    assert await mine.activate(PARTITION) == 100
    assert not mine.reading
    assert "retention" in str(around.saved.halted_reason)
    around.saved = replace(around.saved, next_offset=9, epoch=1)
    await mine.look()
    assert mine.fenced
    assert await mine.activate(PARTITION) == 9
    assert mine.reading
    assert around.saved.halted_reason is None


async def test_a_halt_wiped_out_by_hand_is_judged_anew(mine: Assignment, around: Around) -> None:
    """Reading on from where the subscription is would be the jump that the halt prevents."""
    around.bounds_now = Bounds(9, 100)
    around.saved = replace(FRESH, next_offset=7)
    await mine.activate(PARTITION)
    around.saved = replace(around.saved, halted_reason=None)
    await mine.look()
    assert not mine.reading
    assert mine.fenced


async def test_activation_waits_for_the_database(mine: Assignment, around: Around) -> None:
    """An owner may not raise: it asks again."""
    around.saved = replace(FRESH, next_offset=3)
    around.failures = 2
    assert await mine.activate(PARTITION) == 3


async def test_a_change_of_owner_waits_for_the_turn_and_what_is_in_flight(mine: Assignment, around: Around) -> None:
    """Nothing is given up before it is committed; meanwhile nothing new is taken."""
    await mine.activate(PARTITION)
    around.may_finish.clear()
    finished = around.finished
    async with mine.turn:
        giving_up = asyncio.create_task(mine.deactivate(PARTITION))
        await asyncio.sleep(0)
        assert not mine.reading
        around.records = [Record(0, 0, b"")]
        assert mine.take(1) == []
        assert len(around.records) == 1
    await asyncio.sleep(0)
    assert not giving_up.done()
    around.may_finish.set()
    await giving_up
    assert around.finished == finished + 1


async def test_an_advance_says_where_it_was_and_what_it_passes(mine: Assignment, around: Around) -> None:
    """From the saved position to behind the last of the settled prefix, in the epoch that was read."""
    around.saved = replace(FRESH, next_offset=5, epoch=3)
    await mine.activate(PARTITION)
    assert mine.advance() is None
    entries = enter(mine, [5, 8, 9])
    entries[1].record_id = "x"
    entries[2].settled = False
    found = mine.advance()
    assert found is not None
    move, last = found
    assert (move.was, move.to, move.era, move.record_id, move.record_ms) == (5, 9, 3, "x", 1008)
    mine.window.passed(last)
    assert mine.advance() is None


async def test_a_fenced_assignment_takes_and_advances_nothing(mine: Assignment, around: Around) -> None:
    """Until it has loaded anew."""
    await mine.activate(PARTITION)
    enter(mine, [0, 1])
    mine.fence()
    around.records = [Record(2, 0, b"")]
    assert mine.advance() is None
    assert mine.take(1) == []
    around.saved = replace(FRESH, next_offset=1, epoch=1)
    assert await mine.activate(PARTITION) == 1
    assert mine.reading
    assert not mine.window.entries


@pytest.mark.parametrize(
    ("change", "in_window", "fenced"),
    [
        ({}, False, False),
        ({"epoch": 1}, False, True),
        ({"epoch": 1}, True, True),
        ({"next_offset": 9}, False, True),
        ({"next_offset": 9}, True, False),
        ({"starts": 2}, True, False),
    ],
)
async def test_a_look_notices_that_the_position_was_moved(
    mine: Assignment, around: Around, change: dict[str, Any], in_window: bool, fenced: bool
) -> None:
    """By its epoch always; by its offset while nothing is under way that will find out by itself."""
    around.saved = FRESH
    await mine.activate(PARTITION)
    if in_window:
        enter(mine, [0], settled=False)
    around.saved = replace(FRESH, **change)
    await mine.look()
    assert mine.fenced is fenced
    assert around.observed == [around.bounds_now]


async def test_a_look_notices_pause_and_resume(mine: Assignment, around: Around) -> None:
    """What is in the window stays there; whoever waits to read is woken."""
    around.saved = FRESH
    await mine.activate(PARTITION)
    enter(mine, [0], settled=False)
    around.saved = replace(FRESH, paused=True)
    await mine.look()
    assert not mine.reading
    waiting = asyncio.create_task(mine.readable())
    await asyncio.sleep(0)
    assert not waiting.done()
    around.saved = FRESH
    await mine.look()
    await waiting
    assert len(mine.window.entries) == 1


async def test_a_look_leaves_all_as_it_is_when_the_row_is_gone(mine: Assignment, around: Around) -> None:
    """The next advance will find out."""
    await mine.activate(PARTITION)
    around.saved = None
    await mine.look()
    assert mine.reading


async def test_records_are_read_one_by_one_after_starts_without_progress(mine: Assignment, around: Around) -> None:
    """A turn's worth of them; the counter stays high meanwhile, and falls when all is well again."""
    around.saved = replace(FRESH, starts=KILLS_ITS_READER)
    await mine.activate(PARTITION)
    assert mine.isolated == ISOLATED_RECORDS
    await mine.begun(cast(Sql, None))
    assert (mine.isolated, around.saved.starts) == (ISOLATED_RECORDS - 1, KILLS_ITS_READER)
    mine.isolated = 1
    await mine.begun(cast(Sql, None))
    assert (mine.isolated, around.saved.starts) == (0, 0)


async def test_a_start_is_counted_once_and_set_back_with_the_offset(mine: Assignment, around: Around) -> None:
    """Before its first turn; the next turns write nothing, and the first advance sets it to zero."""
    around.saved = replace(FRESH, starts=1)
    await mine.activate(PARTITION)
    assert mine.counts
    assert await mine.begin(cast(Sql, None)) == 2
    assert not mine.counts
    await mine.begun(cast(Sql, None))
    assert around.saved.starts == 2
    enter(mine, [0])
    move = mine.advance()
    assert move is not None
    assert move[0].starts == 0


async def test_each_record_is_counted_while_they_are_read_one_by_one(mine: Assignment, around: Around) -> None:
    """Taken back with its plan; an advance leaves the mark that the next start reads one by one as well."""
    around.saved = replace(FRESH, starts=KILLS_ITS_READER)
    await mine.activate(PARTITION)
    for _ in range(2):
        assert mine.counts
        assert await mine.begin(cast(Sql, None)) == KILLS_ITS_READER + 1
        await mine.begun(cast(Sql, None))
        assert around.saved.starts == KILLS_ITS_READER
    enter(mine, [0])
    move = mine.advance()
    assert move is not None
    assert move[0].starts == KILLS_ITS_READER


@pytest.mark.parametrize("moved", [False, True])
async def test_a_start_that_ends_in_order_is_not_counted(mine: Assignment, around: Around, moved: bool) -> None:
    """Three deploys while the provider is away are no sign of a record that kills; what has moved needs no write."""
    around.saved = FRESH
    await mine.activate(PARTITION)
    await mine.begin(cast(Sql, None))
    if moved:
        [entry] = enter(mine, [0])
        mine.window.passed(entry)
    await mine.ended()
    assert around.saved.starts == (1 if moved else 0)
    assert mine.counts is not moved


async def test_a_start_stays_counted_when_the_database_is_away_at_its_end(
    mine: Assignment, around: Around, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop does not wait for it."""
    around.saved = FRESH
    await mine.activate(PARTITION)
    await mine.begin(cast(Sql, None))
    monkeypatch.setattr(around, "begun", None)
    await mine.ended()
    assert around.saved.starts == 1
