"""The models and the newest revision describe the same database."""

import re

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect
from sqlalchemy.ext.asyncio import AsyncEngine

from models.tables import metadata
from processors._migrate import migrate
from tests.migration.legacy import query

# Said by SQLAlchemy and alembic of the one index that the third test compares.
pytestmark = pytest.mark.filterwarnings("ignore:.*expression-based index")

PARTIAL = {
    "ix_email_dispatches_due": "status = 'pending'",
    "ix_email_dispatches_failed": "status = 'failed'",
    "uq_dead_letters_row": "row_id IS NOT NULL",
    "uq_dead_letters_item": "row_id IS NULL AND batch_id IS NOT NULL AND redriven_from IS NULL",
    "uq_dead_letters_item_again": "row_id IS NULL AND batch_id IS NOT NULL AND redriven_from IS NOT NULL",
    "uq_dead_letters_record": "row_id IS NULL AND batch_id IS NULL",
    "ix_dead_letters_body_hash": "row_id IS NULL AND batch_id IS NULL",
    "ix_dead_letters_unpublished": "published_at IS NULL",
    "ix_outbox_events_waiting": "status = 'pending' AND queued_until IS NULL",
    "ix_outbox_events_queued": "status = 'pending' AND queued_until IS NOT NULL",
    "ix_repayment_requests_due": "status = 'pending'",
}
CHECKS = {
    "email_dispatches": {"ck_email_dispatches_status", "ck_email_dispatches_pending_never_sent_nor_held"},
    "outbox_events": {
        "ck_outbox_events_status",
        "ck_outbox_events_pending_never_sent_nor_held",
        "ck_outbox_events_event_name",
        "ck_outbox_events_payload",
    },
    "repayment_requests": {"ck_repayment_requests_status", "ck_repayment_requests_pending_never_sent_nor_held"},
    "payments": {"ck_payments_status", "ck_payments_value"},
    "installments": {"ck_installments_status", "ck_installments_value"},
}
VIEWS = (
    "failed_outbox_events",
    "failed_email_dispatches",
    "failed_repayment_requests",
    "import_progress",
    "processor_lag",
)
EXPRESSIONS = ("ix_email_dispatches_due", "ix_outbox_events_waiting", "ix_repayment_requests_due")


async def differences(engine: AsyncEngine) -> list[object]:
    """What autogenerate would change, without expression indexes, which it cannot compare."""

    def compare(connection: Connection) -> list[object]:
        options = {"compare_type": True, "compare_server_default": connection.dialect.name == "postgresql"}
        context = MigrationContext.configure(connection, opts=options)
        found = compare_metadata(context, metadata)
        return [each for each in found if not any(name in str(each) for name in EXPRESSIONS)]

    async with engine.connect() as connection:
        return await connection.run_sync(compare)


async def test_autogenerate_finds_nothing_when_migrated_from_empty(url: str, engine: AsyncEngine) -> None:
    """Tables, columns, types, nullability, defaults, plain indexes."""
    await migrate(url)
    assert await differences(engine) == []


async def test_autogenerate_finds_nothing_when_migrated_from_the_old_tables(url: str, legacy: AsyncEngine) -> None:
    """Types of SQLite are names only; there Laravel's are left as they are."""
    await migrate(url)
    found = await differences(legacy)
    if legacy.dialect.name == "sqlite":
        found = [each for each in found if "modify_type" not in str(each)]
    assert found == []


async def test_checks_and_partial_indexes_are_those_of_the_models(url: str, engine: AsyncEngine) -> None:
    """What autogenerate does not see: compared with a database that the models made."""
    await migrate(url)
    migrated = await partial_indexes(engine)
    assert {name: clean(where) for name, (_, where) in migrated.items()} == PARTIAL
    migrated_checks = await checks(engine)
    assert {table: set(found) for table, found in migrated_checks.items()} == CHECKS

    async with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            await connection.exec_driver_sql(f"DROP VIEW {', '.join(VIEWS)}")
        await connection.run_sync(metadata.drop_all)
        await connection.run_sync(metadata.create_all)
    assert await partial_indexes(engine) == migrated
    assert await checks(engine) == migrated_checks


async def checks(engine: AsyncEngine) -> dict[str, dict[str, str]]:
    """Table -> name -> condition, as the database tells them."""
    async with engine.connect() as connection:
        found = {
            table: await connection.run_sync(lambda sync, table=table: inspect(sync).get_check_constraints(table))  # type: ignore[misc]
            for table in CHECKS
        }
    return {table: {str(each["name"]): clean(each["sqltext"]) for each in rules} for table, rules in found.items()}


async def test_constraints_and_indexes_are_valid_on_postgresql(postgres_url: str) -> None:
    """Built NOT VALID and CONCURRENTLY, and then finished."""
    from streams.database import connect

    await migrate(postgres_url)
    engine = connect(postgres_url, "test")
    try:
        assert await query(engine, "SELECT conname FROM pg_constraint WHERE NOT convalidated") == []
        assert await query(engine, "SELECT indexrelid FROM pg_index WHERE NOT indisvalid") == []
    finally:
        await engine.dispose()


async def partial_indexes(engine: AsyncEngine) -> dict[str, tuple[str, str]]:
    """Name -> (indexed columns or expressions, condition), as the database tells them."""
    if engine.dialect.name == "sqlite":
        rows = await query(engine, "SELECT name, sql AS definition FROM sqlite_master WHERE type = 'index'")
    else:
        rows = await query(
            engine, "SELECT indexname AS name, indexdef AS definition FROM pg_indexes WHERE schemaname = 'public'"
        )
    found = {}
    for row in rows:
        head, where, condition = (row["definition"] or "").partition(" WHERE ")
        if where:
            found[row["name"]] = (head[head.index("(") :].lower(), condition)
    return found


def clean(condition: str) -> str:
    """PostgreSQL adds parentheses and casts."""
    return re.sub(r"::\w+|[()]", "", condition).strip()
