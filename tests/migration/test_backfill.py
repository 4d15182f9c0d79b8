"""The backfill beside others: old code that goes on inserting, the new code, a run before it."""

import asyncio

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from models.keys import idempotency_key
from processors import _backfill
from processors._backfill import Backfilled, backfill
from processors._migrate import migrate
from streams.database import connect
from tests.migration.legacy import insert, query, registration

KEY = idempotency_key("import_registration", 7301, 1, "ana@example.com")


async def keys(engine: AsyncEngine) -> dict[int, str | None]:
    """Id -> key of every row."""
    rows = await query(engine, "SELECT id, idempotency_key FROM email_dispatches ORDER BY id")
    return {row["id"]: row["idempotency_key"] for row in rows}


async def test_every_row_is_sent_once_old_code_has_stopped_and_it_ran_again(
    url: str, legacy: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old code inserts without pause while the migration runs in small chunks; a run after it leaves nothing out."""
    monkeypatch.setattr(_backfill, "CHUNK", 7)
    for number in range(50):
        await insert(legacy, registration(7301, number))
    migrated = asyncio.create_task(migrate(url))
    number = 50
    while not migrated.done():
        await insert(legacy, registration(7301, number))
        number += 1
    assert await migrated
    await backfill(legacy)
    rows = await query(legacy, "SELECT status, idempotency_key FROM email_dispatches")
    assert len(rows) == number
    assert {row["status"] for row in rows} == {"sent"}
    assert len({row["idempotency_key"] for row in rows}) == number
    assert await backfill(legacy) == Backfilled(0, 0)


async def test_the_lowest_id_keeps_the_key_over_chunks_and_runs(
    url: str, legacy: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when its transaction committed after a run had passed it."""
    monkeypatch.setattr(_backfill, "CHUNK", 2)
    for _ in range(5):
        await insert(legacy, registration())
    await migrate(url)
    assert await keys(legacy) == {1: KEY, 2: None, 3: None, 4: None, 5: None}
    await query(legacy, "UPDATE email_dispatches SET id = -1, status = NULL, sent_at = NULL WHERE id = 5")
    await query(legacy, "UPDATE email_dispatches SET id = 50 WHERE id = 1")
    await query(legacy, "UPDATE email_dispatches SET id = 1 WHERE id = -1")
    assert await backfill(legacy) == Backfilled(1, 1)
    assert await keys(legacy) == {1: KEY, 2: None, 3: None, 4: None, 50: None}


async def test_a_row_of_the_engine_keeps_its_key(url: str, engine: AsyncEngine) -> None:
    """Old code mails the same person after the new code did: its row is sent, without a key."""
    await migrate(url)
    old = await insert(engine, registration())
    await query(
        engine,
        """INSERT INTO email_dispatches ("to", subject, content, mailable_type, status, idempotency_key, claim_no)
           VALUES ('a', 's', 'c', 'm', 'pending', :key, 1)""",
        key=KEY,
    )
    assert await backfill(engine) == Backfilled(1, 0)
    assert await keys(engine) == {old: None, old + 1: KEY}


async def test_a_row_that_was_never_dispatched_keeps_no_status(url: str, engine: AsyncEngine) -> None:
    """Nothing says that it was sent, and nothing may say that it is to be sent."""
    await migrate(url)
    await insert(engine, registration())
    await query(engine, "UPDATE email_dispatches SET dispatched_at = NULL")
    assert await backfill(engine) == Backfilled(0, 0)


async def test_the_chunk_is_done_again_when_the_engine_takes_its_key_meanwhile(postgres_url: str) -> None:
    """The engine commits the same key between the backfill's look and its write."""
    await migrate(postgres_url)
    engine = connect(postgres_url, "test")
    try:
        old = await insert(engine, registration())
        async with engine.connect() as other:
            await other.begin()
            await other.exec_driver_sql(
                """INSERT INTO email_dispatches ("to", subject, content, mailable_type, status, idempotency_key)
                   VALUES ('a', 's', 'c', 'm', 'pending', $1)""",
                (KEY,),
            )
            run = asyncio.create_task(backfill(engine))
            while not await query(engine, "SELECT 1 FROM pg_locks WHERE NOT granted"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await other.commit()
            assert await run == Backfilled(1, 0)
        assert await keys(engine) == {old: None, old + 1: KEY}
    finally:
        await engine.dispose()


@pytest.mark.parametrize("meta", ['{"a": ' * 100_000, "{", "\\", '"{"', '{"opp_id": 1e999, "registration": 1}'])
def test_no_key_is_computed_when_meta_is_no_json_or_absurd(meta: str) -> None:
    """SQLite holds any text; a row like this must not stop a migration."""
    assert _backfill.key_of(meta, "ana@example.com") is None
