"""What the person with psql uses: views that show, functions that retry and say by name what they do not."""

import re
from collections.abc import AsyncIterator

import pytest
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from processors._migrate import migrate
from streams.database import connect
from tests.house.tree import ROOT
from tests.migration.legacy import query
from tests.migration.test_rules_of_rows import a_row, time


@pytest.fixture
async def table(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    """A migrated database."""
    await migrate(postgres_url)
    engine = connect(postgres_url, "test")
    yield engine
    await engine.dispose()


async def an_event(engine: AsyncEngine, name: str = "a.b", **columns: str) -> int:
    """Insert an event with SQL expressions for further columns."""
    names = "".join(f", {column}" for column in columns)
    values = "".join(f", {value}" for value in columns.values())
    found = await query(
        engine,
        f"INSERT INTO outbox_events (event_name, payload{names}) VALUES (:name, '{{}}'::jsonb{values}) RETURNING id",
        name=name,
    )
    return int(found[0]["id"])


async def test_one_dispatch_is_retried_completely(table: AsyncEngine) -> None:
    """Pending, attempts 0, no error, due now."""
    row = await a_row(table, "failed", attempts="3", error_message="'450 later'", claim_no="3")
    [done] = await query(table, f"SELECT retry_email_dispatch({row}) AS result")
    assert done["result"] == "retried"
    [found] = await query(table, "SELECT status, attempts, error_message, claim_no FROM email_dispatches")
    assert (found["status"], found["attempts"], found["error_message"], found["claim_no"]) == ("pending", 0, None, 3)


async def test_what_is_not_retried_is_said_by_name(table: AsyncEngine) -> None:
    """Sent, of the old code, held, in progress, not there; and nothing changes."""
    rows = {
        await a_row(table, "sent", sent_at="now()"): "was sent",
        await a_row(table, "failed", held="true"): "is held, because it may have arrived",
        await a_row(table, "pending", lease_until=time(table, 60)): "is in progress until",
        999: "there is no e-mail 999",
    }
    [legacy] = await query(
        table,
        """INSERT INTO email_dispatches ("to", subject, content, mailable_type) VALUES ('a@example.com', 's', 'c', 'm')
        RETURNING id""",
    )
    rows[int(str(legacy["id"]))] = "was sent"
    before = await query(table, "SELECT * FROM email_dispatches ORDER BY id")
    for row, why in rows.items():
        with pytest.raises(DBAPIError, match=why):
            await query(table, f"SELECT retry_email_dispatch({row})")
    assert await query(table, "SELECT * FROM email_dispatches ORDER BY id") == before


async def test_many_dispatches_are_retried_by_filter_and_held_ones_are_named(table: AsyncEngine) -> None:
    """By batch, by error, by time; sent and pending ones are not failed and so not meant."""
    first = await a_row(table, "failed", batch_id="'abc1'", error_message="'450 later'", updated_at="now()")
    held = await a_row(table, "failed", batch_id="'abc1'", held="true", error_message="'unknown'", updated_at="now()")
    other = await a_row(table, "failed", batch_id="'zzz'", error_message="'550 no'", updated_at="now()")
    await a_row(table, "sent", batch_id="'abc1'", sent_at="now()")
    none = await query(table, "SELECT * FROM retry_email_dispatches(failed_since => now() + interval '1 hour')")
    assert none == []
    found = await query(table, "SELECT * FROM retry_email_dispatches(batch => 'abc')")
    assert [(row["row_id"], row["result"]) for row in found] == [(first, "retried"), (held, "held: not retried")]
    found = await query(table, "SELECT * FROM retry_email_dispatches(error_like => '550%')")
    assert [(row["row_id"], row["result"]) for row in found] == [(other, "retried")]
    rows = await query(table, "SELECT id FROM email_dispatches WHERE status = 'pending' ORDER BY id")
    assert [row["id"] for row in rows] == [first, other]


async def test_many_events_are_retried_by_filter(table: AsyncEngine) -> None:
    """By name, by error, all."""
    failed = {"status": "'failed'", "attempts": "3"}
    one = await an_event(table, "a.b", last_error="'HTTP 500: x'", **failed)
    two = await an_event(table, "c.d", last_error="'HTTP 404: x'", **failed)
    found = await query(table, "SELECT * FROM retry_outbox_events(event => 'c.d', error_like => 'HTTP 4%')")
    assert [(row["row_id"], row["result"]) for row in found] == [(two, "retried")]
    found = await query(table, "SELECT * FROM retry_outbox_events()")
    assert [(row["row_id"], row["result"]) for row in found] == [(one, "retried")]
    rows = await query(table, "SELECT status, attempts, last_error FROM outbox_events")
    assert {(row["status"], row["attempts"], row["last_error"]) for row in rows} == {("pending", 0, None)}


async def test_every_statement_of_the_page_runs(table: AsyncEngine) -> None:
    """docs/admin-sql.md, as it stands there; the rows that it names by id are there and failed."""
    await query(table, "ALTER SEQUENCE outbox_events_id_seq RESTART 4711")
    await query(table, "ALTER SEQUENCE email_dispatches_id_seq RESTART 815")
    await an_event(table, status="'failed'")
    await a_row(table, "failed")
    await query(table, "INSERT INTO repayment_requests (id, reference, body, status) VALUES (12, 'r', '{}', 'failed')")
    page = (ROOT / "docs/admin-sql.md").read_text("utf-8")
    blocks = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    statements = [statement for block in blocks for statement in block.split(";") if statement.strip()]
    assert len(statements) >= 11
    async with table.begin() as connection:
        for statement in statements:
            await connection.exec_driver_sql(statement)


async def test_what_has_failed_is_listed_with_its_reason(table: AsyncEngine) -> None:
    """One look for each of the two tables."""
    row = await a_row(table, "failed", error_message="'450 later'", attempts="3", claim_no="6", updated_at="now()")
    event = await an_event(table, status="'failed'", last_error="'HTTP 500: x'", attempts="3", claim_no="3")
    [mail] = await query(table, "SELECT * FROM failed_email_dispatches")
    assert (mail["id"], mail["error_message"], mail["attempts"], mail["tries_ever"]) == (row, "450 later", 3, 6)
    [found] = await query(table, "SELECT * FROM failed_outbox_events")
    assert (found["id"], found["event_name"], found["last_error"]) == (event, "a.b", "HTTP 500: x")


async def test_progress_of_an_import_adds_up(table: AsyncEngine) -> None:
    """total = sent + waiting + failed + rejected + duplicate, as `status` has it."""
    await query(table, "INSERT INTO import_batches (batch_id, total, times_received) VALUES ('b', 8, 1)")
    for index, status in enumerate(("sent", "pending", "failed", "failed")):
        held = "true" if index == 3 else "false"
        await a_row(table, status, batch_id="'b'", batch_index=str(index), held=held)
    for index in (4, 4):
        await query(
            table,
            f"""INSERT INTO dead_letters (processor, source_stream, source_partition, reason, error, batch_id,
            item_index) VALUES ('splitter', 'imports', 0, 'missing', 'e', 'b', {index}) ON CONFLICT DO NOTHING""",
        )
    await query(table, "INSERT INTO batch_duplicates (batch_id, item_index, idempotency_key) VALUES ('b', 5, 'k')")
    [row] = await query(table, "SELECT * FROM import_progress")
    names = ("total", "sent", "waiting", "failed", "rejected", "duplicate", "held")
    assert [row[name] for name in names] == [8, 1, 3, 2, 1, 1, 1]


async def test_lag_is_from_the_ends_that_processors_record(table: AsyncEngine) -> None:
    """Null where no processor has looked yet; never below zero."""
    for partition, end in ((0, 10), (1, "NULL"), (2, 3)):
        await query(
            table,
            f"""INSERT INTO processor_offsets (processor, stream, partition, next_offset, end_offset)
            VALUES ('sync', 'outbox', {partition}, 4, {end})""",
        )
    rows = await query(table, "SELECT lag FROM processor_lag ORDER BY partition")
    assert [row["lag"] for row in rows] == [6, None, 0]
