"""What the table of events itself refuses, writes down and tells, whoever changes it."""

import asyncio
import json
from decimal import Decimal

import pytest
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlmodel.ext.asyncio.session import AsyncSession

from models.audits import EVENT_TYPE
from models.outbox import OutboxEvent, add_event
from processors._migrate import migrate
from streams.database import connect, dialect, driver_connection
from tests.migration.legacy import query
from tests.migration.test_rules_of_rows import time

INSERT = "INSERT INTO outbox_events (event_name, payload) VALUES ('a.b', '{\"n\": 10.10}') RETURNING id"


@pytest.fixture
async def table(url: str, engine: AsyncEngine) -> AsyncEngine:
    """A migrated database."""
    await migrate(url)
    return engine


async def test_name_and_payload_are_enough(table: AsyncEngine) -> None:
    """The contract with applications in any language: everything else has a default."""
    await query(table, INSERT)
    async with AsyncSession(table) as session:
        event = await session.get(OutboxEvent, 1)
        assert event is not None
        assert (event.status, event.attempts, event.claim_no, event.held) == ("pending", 0, 0, False)
        assert event.payload == {"n": Decimal("10.10")}
        assert event.created_at is not None
        assert event.created_at.tzinfo is not None
        assert (event.queued_until, event.next_attempt_at, event.sent_at) == (None, None, None)


async def test_event_exists_only_if_its_transaction_commits(table: AsyncEngine) -> None:
    """The function for Python: in the caller's transaction, with numbers as they were."""
    async with AsyncSession(table) as session:
        add_event(session, "a.b", {"lost": 1})
        await session.flush()
        await session.rollback()
        add_event(session, "a.b", {"id": 12345678901234567890, "a": Decimal("10.10")})
        await session.commit()
    [row] = await query(table, "SELECT CAST(payload AS text) AS payload FROM outbox_events")
    assert sorted(json.loads(str(row["payload"]), parse_float=str).items()) == [
        ("a", "10.10"),
        ("id", 12345678901234567890),
    ]


@pytest.mark.parametrize(
    ("event_name", "payload", "rule"),
    [("", "{}", "ck_outbox_events_event_name"), ("a", "[1]", "ck_outbox_events_payload"), ("a", "1", "_payload")],
)
async def test_insert_is_refused_when_it_breaks_the_contract(
    table: AsyncEngine, event_name: str, payload: str, rule: str
) -> None:
    """In the writer's own transaction, by the name of the rule."""
    values = "(:name, CAST(:payload AS jsonb))" if dialect(table) == "postgresql" else "(:name, :payload)"
    with pytest.raises(IntegrityError, match=rule):
        await query(
            table, f"INSERT INTO outbox_events (event_name, payload) VALUES {values}", name=event_name, payload=payload
        )


async def test_sent_and_held_events_refuse_to_become_pending(table: AsyncEngine) -> None:
    """The careless UPDATE of everything is refused by name."""
    await query(table, INSERT)
    await query(table, f"UPDATE outbox_events SET status = 'sent', sent_at = {time(table, 0)}")
    with pytest.raises(IntegrityError, match="ck_outbox_events_pending_never_sent_nor_held"):
        await query(table, "UPDATE outbox_events SET status = 'pending', attempts = 0")


async def test_changes_of_state_are_audited_and_an_insert_is_not(table: AsyncEngine) -> None:
    """Who may only insert events needs no right to another table; that a claimed event was sent, its row says."""
    await query(table, INSERT)
    await query(table, "UPDATE outbox_events SET attempts = 1, claim_no = 1")
    await query(table, "UPDATE outbox_events SET status = 'failed', attempts = 3, last_error = 'no'")
    await query(table, "UPDATE outbox_events SET status = 'pending', attempts = 0")
    await query(table, f"UPDATE outbox_events SET lease_until = {time(table, 60)}")
    await query(table, f"UPDATE outbox_events SET status = 'sent', sent_at = {time(table, 0)}, lease_until = NULL")
    failed, retried = await query(table, "SELECT * FROM audits ORDER BY id")
    assert (failed["auditable_type"], failed["auditable_id"]) == (EVENT_TYPE, 1)
    assert json.loads(str(failed["new_values"])) == {"status": "failed", "attempts": 3, "last_error": "no"}
    assert json.loads(str(retried["new_values"])) == {"status": "pending", "attempts": 0}
    assert retried["tags"] == ("test postgres" if dialect(table) == "postgresql" else "sql")


async def test_an_event_that_is_being_sent_cannot_be_deleted(table: AsyncEngine) -> None:
    """A row under a running lease stays."""
    await query(table, INSERT)
    await query(table, f"UPDATE outbox_events SET lease_until = {time(table, 60)}")
    with pytest.raises(DBAPIError, match="being sent"):
        await query(table, "DELETE FROM outbox_events")


async def test_the_relay_is_called_once_for_an_insert_and_for_a_retry(postgres_url: str) -> None:
    """Not for the engine's own changes; thousands of events in one statement are one call."""
    await migrate(postgres_url)
    engine = connect(postgres_url, "test")
    called: asyncio.Queue[object] = asyncio.Queue()

    def hear(connection: object, pid: int, channel: str, payload: object) -> None:
        called.put_nowait(payload)

    try:
        async with driver_connection(engine) as listener:
            await listener.add_listener("afluente_relay", hear)
            await query(engine, INSERT.replace("VALUES (", "SELECT ").replace("}')", "}' FROM generate_series(1, 99)"))
            assert await asyncio.wait_for(called.get(), 10) == "outbox_events"
            await query(engine, "UPDATE outbox_events SET attempts = 1, lease_until = now()")
            await query(engine, "UPDATE outbox_events SET status = 'failed', lease_until = NULL")
            assert called.empty()
            await query(engine, "UPDATE outbox_events SET status = 'pending', attempts = 0")
            assert await asyncio.wait_for(called.get(), 10) == "outbox_events"
            assert called.empty()
            await listener.remove_listener("afluente_relay", hear)
    finally:
        await engine.dispose()


async def test_event_that_a_person_calls_sent_is_audited(table: AsyncEngine) -> None:
    """To skip an event is a decision, and somebody's."""
    await query(table, INSERT)
    await query(table, f"UPDATE outbox_events SET status = 'sent', sent_at = {time(table, 0)}")
    [skipped] = await query(table, "SELECT * FROM audits")
    assert json.loads(str(skipped["new_values"])) == {"status": "sent"}
