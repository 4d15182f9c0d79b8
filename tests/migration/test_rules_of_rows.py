"""What the table itself refuses, writes down and tells, whoever changes it."""

import asyncio
import json

import asyncpg
import pytest
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from processors._migrate import migrate
from streams.database import dialect, driver_connection
from tests.migration.legacy import insert, query, registration

CHECK = "ck_email_dispatches_pending_never_sent_nor_held"
TYPE = "App\\Models\\EmailDispatch"


@pytest.fixture
async def table(url: str, engine: AsyncEngine) -> AsyncEngine:
    """A migrated database."""
    await migrate(url)
    return engine


def time(engine: AsyncEngine, seconds: int) -> str:
    """SQL: now plus so many seconds."""
    if dialect(engine) == "postgresql":
        return f"now() + interval '{seconds} seconds'"
    return f"strftime('%Y-%m-%d %H:%M:%f', 'now', '{seconds:+d} seconds')"


async def a_row(engine: AsyncEngine, status: str, **more: str) -> int:
    """Insert a row with SQL expressions for further columns."""
    names = "".join(f", {name}" for name in more)
    values = "".join(f", {value}" for value in more.values())
    found = await query(
        engine,
        f"""INSERT INTO email_dispatches ("to", subject, content, mailable_type, status{names})
            VALUES ('a@example.com', 's', 'c', 'm', :status{values}) RETURNING id""",
        status=status,
    )
    return int(found[0]["id"])


async def audits(engine: AsyncEngine) -> list[dict[str, object]]:
    """All audit rows in order."""
    return await query(engine, "SELECT * FROM audits ORDER BY id")


async def test_a_sent_row_refuses_to_become_pending(table: AsyncEngine) -> None:
    """The careless UPDATE of everything is refused by name, and nothing of it is done."""
    await a_row(table, "failed")
    await a_row(table, "sent", sent_at=time(table, 0))
    with pytest.raises(IntegrityError, match=CHECK):
        await query(table, "UPDATE email_dispatches SET status = 'pending', attempts = 0")
    assert {row["status"] for row in await query(table, "SELECT status FROM email_dispatches")} == {"failed", "sent"}


async def test_a_held_row_refuses_to_become_pending(table: AsyncEngine) -> None:
    """A bulk retry must say AND NOT held; then it works."""
    await a_row(table, "failed", held="true")
    await a_row(table, "failed")
    with pytest.raises(IntegrityError, match=CHECK):
        await query(table, "UPDATE email_dispatches SET status = 'pending', attempts = 0 WHERE status = 'failed'")
    await query(
        table, "UPDATE email_dispatches SET status = 'pending', attempts = 0 WHERE status = 'failed' AND NOT held"
    )
    assert len(await query(table, "SELECT id FROM email_dispatches WHERE status = 'pending'")) == 1


async def test_a_sent_row_is_resent_when_the_person_says_so(table: AsyncEngine) -> None:
    """On purpose: sent_at = NULL in the same statement."""
    row = await a_row(table, "sent", sent_at=time(table, 0))
    await query(table, "UPDATE email_dispatches SET status = 'pending', sent_at = NULL WHERE id = :id", id=row)


async def test_an_unknown_status_is_refused(table: AsyncEngine) -> None:
    """`retry` is no status."""
    with pytest.raises(IntegrityError, match="ck_email_dispatches_status"):
        await a_row(table, "retry")


async def test_a_second_row_of_a_key_is_refused_and_null_keys_are_not(table: AsyncEngine) -> None:
    """Unique, many nulls."""
    await a_row(table, "pending", idempotency_key="'k'")
    await a_row(table, "pending")
    await a_row(table, "pending")
    with pytest.raises(IntegrityError):
        await a_row(table, "pending", idempotency_key="'k'")


async def test_every_change_of_state_is_audited(table: AsyncEngine) -> None:
    """Created, failed with its error, retried by hand: the changed columns before and after, and who."""
    row = await a_row(table, "pending")
    await query(table, "UPDATE email_dispatches SET status = 'failed', attempts = 3, error_message = 'no' WHERE id = 1")
    await query(table, "UPDATE email_dispatches SET status = 'pending', attempts = 0 WHERE id = 1")
    created, failed, retried = await audits(table)
    assert (created["event"], created["auditable_type"], created["auditable_id"]) == ("created", TYPE, row)
    assert json.loads(str(created["new_values"]))["status"] == "pending"
    assert failed["event"] == "updated"
    assert json.loads(str(failed["old_values"])) == {"status": "pending", "attempts": 0, "error_message": None}
    assert json.loads(str(failed["new_values"])) == {"status": "failed", "attempts": 3, "error_message": "no"}
    assert json.loads(str(retried["new_values"])) == {"status": "pending", "attempts": 0}
    who = "test postgres" if dialect(table) == "postgresql" else "sql"
    assert {created["tags"], failed["tags"], retried["tags"]} == {who}
    assert created["created_at"] is not None


async def test_a_claim_is_not_audited_but_a_doubt_and_a_hold_are(table: AsyncEngine) -> None:
    """One line per change of state, not one per try."""
    await a_row(table, "pending", lease_until=time(table, -1))
    await query(table, "UPDATE email_dispatches SET attempts = 1, claim_no = 1")
    assert len(await audits(table)) == 1
    await query(table, "UPDATE email_dispatches SET doubts = doubts + 1")
    await query(table, "UPDATE email_dispatches SET status = 'failed', held = true, lease_until = NULL")
    _, doubt, hold = await audits(table)
    assert json.loads(str(doubt["new_values"])) == {"doubts": 1}
    assert set(json.loads(str(hold["new_values"]))) == {"status", "held"}
    if dialect(table) == "sqlite":
        assert {doubt["tags"], hold["tags"]} == {"engine"}


async def test_a_legacy_row_made_pending_by_hand_is_audited(table: AsyncEngine) -> None:
    """Only the backfill's null to sent leaves no line."""
    await insert(table, registration())
    await query(table, "UPDATE email_dispatches SET status = 'pending'")
    assert len(await audits(table)) == 1


async def test_a_row_that_is_being_sent_cannot_be_deleted(table: AsyncEngine) -> None:
    """A row under a running lease stays; one whose lease has lapsed may go."""
    await a_row(table, "pending", lease_until=time(table, 60))
    with pytest.raises(DBAPIError, match="being sent"):
        await query(table, "DELETE FROM email_dispatches")
    await query(table, f"UPDATE email_dispatches SET lease_until = {time(table, -60)}")
    await query(table, "DELETE FROM email_dispatches")
    assert await query(table, "SELECT id FROM email_dispatches") == []


async def test_an_id_is_never_given_twice_when_the_last_row_was_deleted(table: AsyncEngine) -> None:
    """Messages and dead letters name rows by id."""
    first = await a_row(table, "failed")
    await query(table, "DELETE FROM email_dispatches")
    assert await a_row(table, "failed") > first


async def test_the_relay_is_called_when_a_person_retries(postgres_url: str) -> None:
    """NOTIFY afluente_relay on failed to pending; none on the engine's own changes."""
    from streams.database import connect

    await migrate(postgres_url)
    engine = connect(postgres_url, "test")
    called: asyncio.Queue[str] = asyncio.Queue()

    def hear(connection: object, pid: int, channel: str, payload: object) -> None:
        called.put_nowait(channel)

    try:
        async with driver_connection(engine) as listener:
            assert isinstance(listener, asyncpg.Connection)
            await listener.add_listener("afluente_relay", hear)
            await a_row(engine, "pending")
            await query(engine, "UPDATE email_dispatches SET attempts = 1, lease_until = now()")
            await query(engine, "UPDATE email_dispatches SET status = 'failed', lease_until = NULL")
            assert called.empty()
            await query(engine, "UPDATE email_dispatches SET status = 'pending', attempts = 0")
            assert await asyncio.wait_for(called.get(), 10) == "afluente_relay"
            assert called.empty()
            await listener.remove_listener("afluente_relay", hear)
    finally:
        await engine.dispose()
