"""The engine while its database is away, read-only, full, slow or locked; and two processes on the same rows."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from streams.database import connect
from streams.errors import Reject, Retry
from streams.testing import MemoryLog, eventually
from tests.support.databases import query
from tests.support.engine import LIMITS, Scripted, Stage, first, running

KEYS = [f"k{n}" for n in range(10)]
SHORT_LEASE = {"act_timeout": 1.5, "lease": 4.0, "visibility": 0.5}


@asynccontextmanager
async def person(engine: AsyncEngine, statement: str) -> AsyncIterator[None]:
    """psql: BEGIN, a statement, lunch; ROLLBACK at the end of the block."""
    mine = connect(str(engine.url), "psql")
    try:
        async with mine.connect() as connection, connection.begin() as transaction:
            await connection.execute(text(statement))
            yield
            await transaction.rollback()
    finally:
        await mine.dispose()


async def cut(stage: Stage) -> None:
    """End every other session of this database, as a restart or a failover does."""
    await stage.query(
        """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid()"""
    )


# ---- two processes


def process(url: str, processor: Scripted, keys: list[str], barrier: threading.Barrier) -> None:
    """A mailer in a thread of its own; both plan at the same instant."""
    passed: list[None] = []

    def step(name: str) -> None:
        if name == "decoded" and not passed:
            passed.append(None)
            barrier.wait(20)

    async def main() -> None:
        engine = connect(url, "afluente-test")
        limits = replace(LIMITS, turn_records=len(keys), slots=8, in_doubt=8, act_timeout=20.0, lease=30.0)
        stage = Stage(engine, MemoryLog(), limits)
        stage.processor = processor
        await stage.declare()
        await stage.publish(*map(first, keys))
        async with running(stage.runtime(step)):
            # the barrier holds this thread's loop: look at the database before, and its lock would be held as well
            await eventually(lambda: _assert(bool(passed)))
            await stage.all_sent(keys)
        await engine.dispose()

    asyncio.run(main())


async def test_five_hundred_keys_that_come_to_two_processes_at_once_are_sent_once(database_url: str) -> None:
    """O-27: a barrier before the insert. The loser of a row does nothing: no error, no attempt."""
    keys = [f"k{n}" for n in range(500)]
    processor, barrier = Scripted(), threading.Barrier(2)
    await asyncio.gather(*(asyncio.to_thread(process, database_url, processor, keys, barrier) for _ in range(2)))
    assert processor.sent == dict.fromkeys(keys, 1)
    engine = connect(database_url, "test")
    tried = await query(engine, "SELECT id FROM email_dispatches WHERE attempts <> 1 OR claim_no <> 1 OR doubts > 0")
    assert tried == []
    await engine.dispose()


# ---- the database goes away


async def test_nothing_is_lost_or_sent_twice_when_sessions_are_cut_in_mid_run(postgres_stage: Stage) -> None:
    """Again and again while it sends: what was being committed is committed on the next connection."""
    stage = postgres_stage
    stage.change(**SHORT_LEASE)
    keys = [f"k{n}" for n in range(120)]
    async with running(stage.runtime(), stage.relay()):
        for n in range(0, 120, 20):
            await stage.publish(*map(first, keys[n : n + 20]))
            await stage.until(partial(_more_are_sent, stage, n))
            await cut(stage)
        await stage.all_sent(keys)
        await stage.offset_is((await stage.log.bounds((await stage.log.partitions("recipients"))[0])).next)
    assert stage.processor.sent == dict.fromkeys(keys, 1)


def _more_are_sent(stage: Stage, than: int) -> None:
    assert len(stage.processor.sent) > than


def _assert(condition: bool) -> None:
    assert condition


async def test_nothing_is_sent_while_the_database_is_read_only(postgres_stage: Stage) -> None:
    """O-28: a claim that cannot be written is no claim. It recovers without a restart when it can be written again."""
    stage = postgres_stage
    stage.change(**SHORT_LEASE)
    [name] = [row["name"] for row in await stage.query("SELECT current_database() AS name")]
    await stage.publish(*map(first, KEYS))
    async with running(stage.runtime(), stage.relay()):
        await stage.all_sent(KEYS)
        await stage.query(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        await cut(stage)
        await stage.publish(*(first(f"new{n}") for n in range(10)))
        failed = asyncio.Event()
        noticing = _notice_read_only(stage, failed)
        async with asyncio.timeout(20):
            await failed.wait()
        noticing()
        assert len(stage.processor.sent) == 10
        admin = connect(str(stage.engine.url).rsplit("/", 1)[0] + "/postgres", "test")
        await query(admin, f"ALTER DATABASE {name} RESET default_transaction_read_only")
        await admin.dispose()
        await stage.all_sent([*KEYS, *(f"new{n}" for n in range(10))])
    assert set(stage.processor.sent.values()) == {1}


def _notice_read_only(stage: Stage, failed: asyncio.Event) -> Any:
    """Set the event when a connection was thrown away: a write was refused."""

    def invalidated(*_: object) -> None:
        failed.set()

    event.listen(stage.engine.sync_engine.pool, "invalidate", invalidated)
    return lambda: event.remove(stage.engine.sync_engine.pool, "invalidate", invalidated)


async def test_a_commit_that_is_cancelled_leaves_no_open_transaction(postgres_stage: Stage) -> None:
    """O-29: slow commits, and a stop in the middle of one. The pool is as good as new; what says sent is sent."""
    stage = postgres_stage
    stage.change(**SHORT_LEASE)
    for statement in (
        """CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS
           $$ BEGIN PERFORM pg_sleep(0.2); RETURN NULL; END $$""",
        """CREATE CONSTRAINT TRIGGER slow AFTER UPDATE ON email_dispatches DEFERRABLE INITIALLY DEFERRED
           FOR EACH ROW WHEN (NEW.status = 'sent') EXECUTE FUNCTION slowly()""",
    ):
        await stage.query(statement)
    await stage.publish(*map(first, KEYS[:6]))
    for _ in range(2):
        recording = asyncio.Event()

        def step(name: str, recording: asyncio.Event = recording) -> None:
            if name == "recording" and stage.processor.sent:
                recording.set()

        run = asyncio.create_task(stage.runtime(step).run(asyncio.Event()))
        await recording.wait()
        await eventually(lambda: _session_is(stage, "state = 'active' AND query LIKE '%sent AS%'"))
        run.cancel()
        with suppress(asyncio.CancelledError):
            await run
        await stage.log.close()
        await eventually(lambda: _session_is(stage, "state <> 'idle'", there=False))
        assert await stage.count("status <> 'sent' AND sent_at IS NOT NULL") == 0
    await stage.query("DROP TRIGGER slow ON email_dispatches")
    async with running(stage.runtime(), stage.relay()):
        await stage.all_sent(KEYS[:6])
    for key, times in stage.processor.sent.items():
        assert times <= 1 + (await stage.row(key))["doubts"]


async def _session_is(stage: Stage, condition: str, there: bool = True) -> None:
    rows = await stage.query(
        f"""SELECT pid, state, query FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid() AND {condition}"""
    )
    assert bool(rows) is there, rows


async def test_a_full_disk_ends_nothing_and_loses_nothing(sqlite_stage: Stage) -> None:
    """SQLite rolls back by itself when it is full; it is waited for like any absence."""
    stage = sqlite_stage
    stage.processor.all_may_go.clear()
    await stage.publish(*map(first, KEYS[:4]))
    full = [False]

    @event.listens_for(stage.engine.sync_engine, "checkout")
    def bound(connection: Any, record: object, proxy: object) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA page_count")
        pages = cursor.fetchone()[0]
        cursor.execute(f"PRAGMA max_page_count = {pages if full[0] else 1_000_000}")
        cursor.close()

    async with running(stage.runtime()):
        await stage.begun(*KEYS[:4])
        full[0] = True
        stage.processor.values["big"] = {"content": "x" * 1_000_000}
        refused = asyncio.Event()
        event.listen(stage.engine.sync_engine.pool, "invalidate", lambda *_: refused.set())
        await stage.publish(first("big"))
        async with asyncio.timeout(20):
            await refused.wait()
        full[0] = False
        stage.processor.all_may_go.set()
        await stage.all_sent([*KEYS[:4], "big"])
    assert set(stage.processor.sent.values()) == {1}


async def test_outcomes_wait_for_a_database_that_somebody_writes_to(sqlite_stage: Stage) -> None:
    """SQLite has one writer: a transaction left open holds up the commit, and no longer than it lasts."""
    stage = sqlite_stage
    stage.processor.all_may_go.clear()
    await stage.publish(*map(first, KEYS))
    async with running(stage.runtime()):
        await stage.begun(*KEYS[:4])
        async with person(stage.engine, "UPDATE email_dispatches SET subject = 'x'"):
            stage.processor.all_may_go.set()
            await stage.until(lambda: _assert(len(stage.processor.sent) == 4))
        await stage.all_sent(KEYS)
    assert set(stage.processor.sent.values()) == {1}


# ---- a person's open transaction


@pytest.mark.parametrize("error", [None, Retry("451 later"), Reject("no", "no")], ids=["sent", "retry", "reject"])
async def test_a_locked_row_holds_up_its_own_outcome_alone(postgres_stage: Stage, error: Exception | None) -> None:
    """BEGIN; UPDATE; lunch: the others of its group and all that follow are recorded, this one when it is free."""
    stage = postgres_stage
    stage.processor.all_may_go.clear()
    if error is not None:
        stage.processor.errors["k1"] = [error]
    keys = [f"k{n}" for n in range(30)]
    await stage.publish(*map(first, keys))
    async with running(stage.runtime()):
        await stage.begun(*keys[:4])
        async with person(stage.engine, "UPDATE email_dispatches SET subject = 'x' WHERE idempotency_key = 'k1'"):
            stage.processor.all_may_go.set()
            for key in keys:
                if key != "k1":
                    await stage.status(key, "sent")
            await stage.offset_is(1)
            assert (await stage.row("k1"))["lease_until"] is not None
        await stage.offset_is(30)
    row = await stage.row("k1")
    assert (row["status"], row["lease_until"]) == (_status(error), None)
    assert stage.processor.acts("k1") == 1
    assert len(await stage.dead_letters()) == isinstance(error, Reject)


def _status(error: Exception | None) -> str:
    if error is None:
        return "sent"
    return "failed" if isinstance(error, Reject) else "pending"


async def test_outcomes_are_recorded_while_a_person_has_the_position_locked(postgres_stage: Stage) -> None:
    """The offset is tried again and again, and moves when it is free."""
    stage = postgres_stage
    commits: list[str] = []
    stage.processor.all_may_go.clear()
    await stage.publish(*map(first, KEYS))
    async with running(stage.runtime(lambda name: commits.append(name) if name == "recording" else None)):
        await stage.begun(*KEYS[:4])
        async with person(stage.engine, "UPDATE processor_offsets SET paused_reason = 'x'"):
            stage.processor.all_may_go.set()
            for key in KEYS[:4]:
                await stage.status(key, "sent")
            tried = len(commits)
            await stage.until(lambda: _assert(len(commits) >= tried + 2))
            assert (await stage.position())["next_offset"] == 0
        await stage.all_sent(KEYS)
        await stage.offset_is(10)
    assert set(stage.processor.sent.values()) == {1}
    assert stage.processor.most_running <= 4


async def test_a_stop_waits_for_the_outcome_of_a_locked_row(postgres_stage: Stage) -> None:
    """SIGTERM while a row is locked: what went out is recorded before the process ends."""
    stage = postgres_stage
    stage.processor.all_may_go.clear()
    await stage.publish(first("a"), first("b"))
    stop = asyncio.Event()
    run = asyncio.create_task(stage.runtime().run(stop))
    await stage.begun("a", "b")
    async with person(stage.engine, "UPDATE email_dispatches SET subject = 'x' WHERE idempotency_key = 'a'"):
        stage.processor.all_may_go.set()
        await stage.status("b", "sent")
        stop.set()
        await stage.publish(first("late"))
        assert not run.done()
    await run
    assert (await stage.row("a"))["status"] == "sent"
    assert stage.processor.acts("late") == 0


# ---- an act that does not end


async def test_an_act_is_ended_and_tried_again_when_it_does_not_end_by_its_deadline(stage: Stage) -> None:
    """A provider's library that hangs holds its slot no longer than the deadline and a second; it costs an attempt."""
    stage.change(act_timeout=0.3)
    hanging = stage.processor.block("slow")
    await stage.publish(first("slow"), first("quick"))
    async with running(stage.runtime(), stage.relay()):
        await stage.until(partial(_was_ended, stage, "slow"))
        hanging.set()
        await stage.all_sent(["slow", "quick"])
    assert stage.processor.sent == {"slow": 1, "quick": 1}


async def _was_ended(stage: Stage, key: str) -> None:
    assert "TimeoutError" in ((await stage.row(key))["error_message"] or "")
