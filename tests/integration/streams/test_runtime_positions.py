"""Where a processor reads while people and logs move that under it: replay, pause, retention, a stream made anew."""

import asyncio

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from streams import offsets
from streams.database import dialect, driver_connection
from streams.errors import Retry
from streams.log import Partition, StreamSpec
from streams.recovery import RecoveryPolicy
from streams.sql import sql
from streams.testing import MemoryLog, MovableClock, eventually
from tests.support.engine import NAME, STREAM, Stage, crash, first, running

KEYS = [f"k{n}" for n in range(10)]


async def halted(stage: Stage, partition: int = 0) -> str:
    """Wait until a partition says why it does not read; answers why."""

    async def says_why() -> str:
        reason = (await stage.position(partition))["halted_reason"]
        assert reason
        return str(reason)

    return await eventually(says_why)


async def replay(stage: Stage, offset: int) -> None:
    """What the replay command does."""
    async with driver_connection(stage.engine) as connection:
        [partition, *_] = await stage.log.partitions(STREAM)
        await offsets.replay(sql(connection, dialect(stage.engine)), NAME, partition, offset)


# ---- the settled prefix


async def test_the_offset_never_passes_a_record_that_is_not_settled(stage: Stage) -> None:
    """One act is stuck: all behind it are sent, the offset stays before it, and passes everything when it ends."""
    may_go = stage.processor.block("k3")
    await stage.publish(*map(first, KEYS))
    async with running(stage.runtime()):
        for key in KEYS:
            if key != "k3":
                await stage.status(key, "sent")
        await stage.offset_is(3)
        may_go.set()
        await stage.offset_is(10)


async def test_the_offset_waits_for_a_record_that_lacks_only_a_slot(stage: Stage) -> None:
    """Inserted and queued here: a death now must read it again, or nobody knows how long it waits."""
    stage.processor.all_may_go.clear()
    await stage.publish(*map(first, KEYS))
    async with running(stage.runtime()):
        await stage.begun(*KEYS[:4])
        assert (await stage.position())["next_offset"] == 0
        stage.processor.all_may_go.set()
        await stage.offset_is(10)


async def test_the_offset_passes_a_row_that_waits_for_its_time(stage: Stage) -> None:
    """The row says when it goes on; the stream does not wait for it."""
    stage.change(recovery=RecoveryPolicy(backoff=(600.0,)))
    stage.processor.errors["k0"] = [Retry("451 later")]
    await stage.publish(*map(first, KEYS))
    async with running(stage.runtime()):
        await stage.offset_is(10)
    assert (await stage.row("k0"))["status"] == "pending"


async def test_a_new_process_goes_on_where_the_old_one_stopped(stage: Stage) -> None:
    """A clean stop finishes what is in flight, drops what waits for a slot, and nobody is in doubt."""
    stage.processor.all_may_go.clear()
    await stage.publish(*map(first, KEYS))
    stop = asyncio.Event()
    run = asyncio.create_task(stage.runtime().run(stop))
    await stage.begun(*KEYS[:4])
    stop.set()
    stage.processor.all_may_go.set()
    await run
    assert await stage.count("lease_until IS NOT NULL") == 0
    sent = await stage.count("status = 'sent'")
    assert sent >= 4
    assert (await stage.position())["next_offset"] == sent
    async with running(stage.runtime()):
        await stage.all_sent(KEYS)
    assert set(stage.processor.sent.values()) == {1}
    assert await stage.count("doubts > 0 OR attempts <> 1") == 0


# ---- replay


async def test_a_replay_while_running_repeats_nothing_and_loses_no_outcome(stage: Stage) -> None:
    """H7: what is in flight is recorded although the offset was moved; then all is read again, nobody mailed twice."""
    await stage.publish(*map(first, KEYS))
    async with running(stage.runtime()):
        await stage.offset_is(10)
        may_go = stage.processor.block("x")
        await stage.publish(first("x"), first("y"))
        await stage.begun("x")
        await replay(stage, 0)
        may_go.set()
        await stage.all_sent([*KEYS, "x", "y"])
        await stage.offset_is(12)
    assert set(stage.processor.sent.values()) == {1}
    assert len(stage.processor.known_keys) >= 10
    assert (await stage.position())["epoch"] == 1


async def test_nothing_is_claimed_once_the_position_was_moved(stage: Stage) -> None:
    """The first commit that finds the offset elsewhere claims no more for the records that it had read."""
    stage.change(idle_look=600.0)
    await stage.publish(*map(first, KEYS))
    may_go = stage.processor.block("k0")
    stage.processor.block("k1")
    async with running(stage.runtime()):
        await stage.begun("k0", "k1")
        await stage.status("k9", "sent")
        await stage.publish(first("x"))
        await stage.status("x", "sent")
        await replay(stage, 0)
        may_go.set()
        await stage.status("k0", "sent")
        await stage.publish(first("late"))
        stage.processor.block("k1").set()
        await stage.status("k1", "sent")
    assert stage.processor.acts("late") == 0
    assert (await stage.position())["next_offset"] == 0


async def test_a_replay_of_one_partition_loses_no_record_of_another(engine: AsyncEngine) -> None:
    """A commit that finds one offset moved claims nothing; what it wanted for the other partition comes next."""
    stage = Stage(engine, MemoryLog())
    await stage.declare(2)
    stage.change(slots=1, in_doubt=1, idle_look=600.0)
    may_go = stage.processor.block("a")
    await stage.publish(first("a"))
    async with running(stage.runtime()):
        await stage.begun("a")
        await stage.publish(first("b"), first("c"), partition=1)

        async def are_planned() -> None:
            assert await stage.count("true") == 3

        await stage.until(are_planned)
        await replay(stage, 0)
        may_go.set()
        await stage.all_sent(["a", "b", "c"])
        await stage.offset_is(2, partition=1)
    assert (await stage.position())["next_offset"] == 0


async def test_an_idle_processor_notices_a_replay(stage: Stage) -> None:
    """Nothing comes, so no commit tells it: it looks."""
    await stage.publish(*map(first, KEYS))
    async with running(stage.runtime()):
        await stage.offset_is(10)
        await replay(stage, 4)
        await stage.until(lambda: _assert(len(stage.processor.known_keys) == 6))
        await stage.offset_is(10)


def _assert(condition: bool) -> None:
    assert condition


async def test_a_deleted_row_is_sent_again_by_a_replay_only(stage: Stage) -> None:
    """Rows are the memory: without one, its first message makes it anew."""
    await stage.publish(*map(first, KEYS))
    async with running(stage.runtime()):
        await stage.offset_is(10)
        await stage.query("DELETE FROM email_dispatches WHERE idempotency_key = 'k5'")
        await replay(stage, 0)
        await stage.all_sent(KEYS)
    assert stage.processor.sent == {**dict.fromkeys(KEYS, 1), "k5": 2}


# ---- pause and resume


async def test_a_pause_finishes_what_is_in_flight_and_a_resume_goes_on_exactly(stage: Stage) -> None:
    """By SQL: four in flight end and are recorded, nothing more is claimed; after the resume each is sent once."""
    stage.processor.all_may_go.clear()
    await stage.publish(*map(first, KEYS))
    runtime = stage.runtime()
    async with running(runtime):
        await stage.begun(*KEYS[:4])
        await stage.query("UPDATE processor_offsets SET paused = true, paused_reason = 'a test'")
        await stage.until(lambda: _assert(not runtime._assignments[0].reading))
        stage.processor.all_may_go.set()
        for key in KEYS[:4]:
            await stage.status(key, "sent")
        await stage.offset_is(4)
        await stage.publish(first("x"))
        assert await stage.count("attempts > 0") == 4
        await stage.query("UPDATE processor_offsets SET paused = false, paused_reason = NULL")
        await stage.all_sent([*KEYS, "x"])
        await stage.offset_is(11)
    assert set(stage.processor.sent.values()) == {1}


@pytest.mark.parametrize("how", ["begin", "replay"])
async def test_a_partition_begins_paused_when_the_processor_is_paused(stage: Stage, how: str) -> None:
    """A pause holds for the processor: a partition nobody had read yet is no way around it."""
    known, unknown = Partition(STREAM, 1, f"{STREAM}-1"), Partition(STREAM, 0, f"{STREAM}-0")
    async with driver_connection(stage.engine) as connection:
        database = sql(connection, dialect(stage.engine))
        await offsets.create(database, NAME, known, 0)
        await stage.query("UPDATE processor_offsets SET paused = true, paused_reason = 'a test'")
        place = offsets.create if how == "begin" else offsets.replay
        await place(database, NAME, unknown, 5)
        await offsets.create(database, "another", unknown, 5)
        position, other = [await offsets.load(database, name, unknown) for name in (NAME, "another")]
    assert position is not None
    assert other is not None
    assert (position.next_offset, position.paused, position.paused_reason) == (5, True, "a test")
    assert (other.paused, other.paused_reason) == (False, None)


async def test_a_paused_processor_stays_paused_when_it_is_started_anew(stage: Stage) -> None:
    """The pause is in the row, not in the process."""
    await stage.publish(*map(first, KEYS))
    async with running(stage.runtime()):
        await stage.offset_is(10)
    await stage.query("UPDATE processor_offsets SET paused = true")
    await stage.publish(first("x"))
    runtime = stage.runtime()
    async with running(runtime):
        await stage.until(lambda: _assert(bool(runtime._assignments and runtime._assignments[0].active)))

        async def end_is_seen() -> None:
            assert (await stage.position())["end_offset"] == 11

        await stage.until(end_is_seen)
        assert await stage.count("idempotency_key = 'x'") == 0
        await stage.query("UPDATE processor_offsets SET paused = false")
        await stage.all_sent([*KEYS, "x"])


# ---- never a silent jump


async def _partitions(stage: Stage) -> list[Partition]:
    return await stage.log.partitions(STREAM)


async def test_a_reader_that_retention_has_overtaken_halts_and_says_so(engine: AsyncEngine) -> None:
    """Records are gone that nobody read: this partition waits for a person, the other goes on."""
    stage = Stage(engine, MemoryLog())
    await stage.declare(2)
    await stage.publish(*map(first, KEYS[:5]))
    async with running(stage.runtime()):
        await stage.offset_is(5)
        await stage.offset_is(0, partition=1)
    await stage.publish(first("lost"), first("kept"))
    assert isinstance(stage.log, MemoryLog)
    stage.log.truncate((await _partitions(stage))[0], 6)
    async with running(stage.runtime()):
        assert "retention" in await halted(stage)
        await stage.publish(first("other"), partition=1)
        await stage.status("other", "sent")
        assert await stage.count("idempotency_key = 'kept'") == 0
        assert (await stage.position())["next_offset"] == 5
        await replay(stage, 6)
        await stage.status("kept", "sent")
        await stage.offset_is(7)
    assert (await stage.position())["halted_reason"] is None


async def test_a_halt_that_is_wiped_out_by_hand_does_not_jump(stage: Stage) -> None:
    """Only a replay says where to go on."""
    await stage.publish(*map(first, KEYS[:5]))
    async with running(stage.runtime()):
        await stage.offset_is(5)
    await stage.publish(first("lost"), first("kept"))
    assert isinstance(stage.log, MemoryLog)
    stage.log.truncate((await _partitions(stage))[0], 6)
    async with running(stage.runtime()):
        await halted(stage)
        await stage.query("UPDATE processor_offsets SET halted_reason = NULL")
        await halted(stage)
        await stage.publish(first("new"))
        assert (await stage.position())["next_offset"] == 5
        await replay(stage, 6)
        await stage.status("kept", "sent")
        await stage.status("new", "sent")


async def test_a_position_beyond_the_end_halts(stage: Stage) -> None:
    """The stream was made anew and is shorter."""
    await stage.publish(*map(first, KEYS))
    async with running(stage.runtime()):
        await stage.offset_is(10)
    stage.log = MemoryLog()
    await stage.declare()
    await stage.publish(first("new"))
    async with running(stage.runtime()):
        assert "made anew" in await halted(stage)
        assert await stage.count("idempotency_key = 'new'") == 0
        await replay(stage, 0)
        await stage.status("new", "sent")


async def test_a_stream_made_anew_that_has_grown_past_the_position_halts(stage: Stage) -> None:
    """The bounds say nothing; the record before the position is not the one that was read there."""
    await stage.publish(*map(first, KEYS))
    async with running(stage.runtime()):
        await stage.offset_is(10)
    later = MovableClock()
    later.step(365 * 24 * 3600)
    stage.log = MemoryLog(later.time)
    await stage.declare()
    await stage.publish(*[first(f"new{n}") for n in range(20)])
    async with running(stage.runtime()):
        assert "not the one that was read" in await halted(stage)
        assert await stage.count("idempotency_key LIKE 'new%'") == 0
        await replay(stage, 0)
        await stage.all_sent([*KEYS, *(f"new{n}" for n in range(20))])


async def test_the_same_stream_is_read_on_after_a_restart(stage: Stage) -> None:
    """The record before the position is read along, is the same, and is not acted on again."""
    await stage.publish(*map(first, KEYS))
    async with running(stage.runtime()):
        await stage.offset_is(10)
    await stage.publish(first("x"))
    async with running(stage.runtime()):
        await stage.all_sent([*KEYS, "x"])
        await stage.offset_is(11)
    assert stage.processor.known_keys == []


# ---- two processes


async def test_a_fenced_owner_and_the_new_one_send_nothing_twice(stage: Stage) -> None:
    """The old one still lives on another connection: what it has in flight is recorded, what it queued is not sent."""
    other = MemoryLog()
    await other.declare(StreamSpec(STREAM, 1))
    elsewhere = Stage(stage.engine, other, stage.limits)
    elsewhere.processor = stage.processor
    stage.processor.all_may_go.clear()
    for each in (stage, elsewhere):
        await each.publish(*map(first, KEYS))
    async with running(stage.runtime()):
        await stage.begun(*KEYS[:4])
        async with running(elsewhere.runtime()):
            await stage.begun(*KEYS[:8])
            stage.processor.all_may_go.set()
            await stage.all_sent(KEYS)
            await stage.offset_is(10)
    assert set(stage.processor.sent.values()) == {1}
    assert await stage.count("doubts > 0 OR attempts <> 1") == 0


async def test_the_next_member_reads_on_when_one_dies(stage: Stage) -> None:
    """Two members of one group; the active one ends in mid-act: the other leaves its leased rows alone."""
    stage.processor.block("k0")
    await stage.publish(*map(first, KEYS))
    log = stage.log
    dying = asyncio.create_task(stage.runtime().run(asyncio.Event()))
    await stage.begun("k0")
    await stage.until(lambda: _assert(stage.processor.acts("k9") == 1))
    await crash(dying, log)
    async with running(stage.runtime()):
        await stage.offset_is(10)
    row = await stage.row("k0")
    assert (row["status"], row["attempts"], stage.processor.acts("k0")) == ("pending", 1, 1)
