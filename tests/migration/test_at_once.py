"""Several pods migrate at once, and beside people who hold locks."""

import asyncio
import logging
import sys
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from processors import _migration_steps
from processors._migrate import ADVISORY_LOCK, current_is_head, downgrade, migrate
from streams.database import connect
from tests.migration.legacy import create_legacy_tables, insert, query, registration

ROOT = Path(__file__).parents[2]
POD = """
import asyncio, sys
from processors._migrate import migrate
print(asyncio.run(migrate(sys.argv[1])))
"""


async def pod(url: str) -> str:
    """A process of its own that migrates; "True" if it was the one that did."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", POD, url), cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode().strip()


@pytest.mark.parametrize("start", ["empty", "one revision behind"])
async def test_one_of_five_pods_migrates_and_all_succeed(url: str, engine: AsyncEngine, start: str) -> None:
    """On an empty database, and from one revision behind."""
    if start != "empty":
        await migrate(url)
        await downgrade(url, "-1")
    done = await asyncio.gather(*(pod(url) for _ in range(5)))
    assert sorted(done) == ["False"] * 4 + ["True"]
    assert await current_is_head(engine)


async def test_a_pod_at_head_takes_no_lock(postgres_url: str) -> None:
    """Somebody else holds it, and a pod that has nothing to do starts all the same."""
    await migrate(postgres_url)
    engine = connect(postgres_url, "test")
    try:
        async with engine.connect() as holder:
            await holder.exec_driver_sql(f"SELECT pg_advisory_lock({ADVISORY_LOCK})")
            assert not await asyncio.wait_for(migrate(postgres_url), 30)
    finally:
        await engine.dispose()


async def test_the_lock_is_free_when_its_holder_was_killed(url: str, engine: AsyncEngine) -> None:
    """A pod dies in mid-migration; the next one goes on."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOLDER, url), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"locked\n"
    process.kill()
    await process.wait()
    assert await asyncio.wait_for(migrate(url), 60)
    assert await current_is_head(engine)


HOLDER = """
import asyncio, sys
from processors import _migrate
async def hold():
    engine = _migrate.connect(sys.argv[1], "holder")
    async with _migrate._alone(engine):
        print("locked", flush=True)
        await asyncio.Event().wait()
asyncio.run(hold())
"""


async def test_the_migration_gives_way_and_asks_again_when_the_table_is_in_use(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A report holds the table; the migration lets others pass, and goes on when the report is done."""
    monkeypatch.setattr(_migration_steps, "LOCK_SECONDS", 0.1)
    monkeypatch.setattr(_migration_steps, "PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(_migration_steps, "PATIENCE", 1000)
    engine = connect(postgres_url, "test")
    try:
        await create_legacy_tables(engine)
        async with engine.connect() as report:
            await report.exec_driver_sql("SELECT * FROM email_dispatches")
            with caplog.at_level(logging.WARNING):
                run = asyncio.create_task(migrate(postgres_url))
                while "the table is in use" not in caplog.text:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.wait_for(insert(engine, registration()), 10)
            await report.rollback()
        assert await run
    finally:
        await engine.dispose()


async def test_the_migration_goes_on_where_it_was_cut_off(postgres_url: str) -> None:
    """Columns and a check exist, an index is there but invalid: as after a kill in mid-step."""
    engine = connect(postgres_url, "test")
    try:
        await create_legacy_tables(engine)
        await query(
            engine, "ALTER TABLE email_dispatches ADD COLUMN status text, ADD COLUMN idempotency_key varchar(64)"
        )
        await query(
            engine, "CREATE UNIQUE INDEX uq_email_dispatches_idempotency_key ON email_dispatches (idempotency_key)"
        )
        await query(
            engine,
            "UPDATE pg_index SET indisvalid = false"
            " WHERE indexrelid = to_regclass('uq_email_dispatches_idempotency_key')",
        )
        assert await migrate(postgres_url)
        assert await query(engine, "SELECT indexrelid FROM pg_index WHERE NOT indisvalid") == []
    finally:
        await engine.dispose()
