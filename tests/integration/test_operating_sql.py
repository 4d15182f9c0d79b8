"""The SQL of docs/operating.md, as it stands there, on both databases: it runs, and does what the page says."""

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from models.tables import EmailDispatch
from streams.database import connect, dialect
from tests.conftest import ROOT
from tests.support.databases import Migrated, query
from tests.support.documents import statements

PAGE = ROOT / "docs/operating.md"
BATCH = "d332228b11f3f26877c00892394a2b17005e891e115ce9422ab5b87d14896227"
STATEMENTS = statements(PAGE)

ROWS = {
    41: "'pending', 1, null, false, 0, 'connect: refused', '2099-01-01 00:00:00+00:00'",
    42: "'failed', 3, null, false, 0, 'connect: refused', null",
    43: "'failed', 3, null, false, 0, '550 5.1.1 no such user (at RCPT)', null",
    44: "'failed', 1, null, true, 1, 'outcome unknown', null",
    45: "'sent', 1, '2026-12-01 00:00:00+00:00', false, 1, null, null",
    46: "null, 0, null, false, 0, null, null",
}
"""One of each kind, by id: status, attempts, sent_at, held, doubts, error_message, next_attempt_at."""


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, migrated: Migrated, tmp_path: Path) -> Iterator[str]:
    """A migrated database, once of each kind."""
    if request.param == "postgresql":
        request.getfixturevalue("services")
    with migrated.copy(request.param, tmp_path) as found:
        yield found


@pytest.fixture
async def engine(url: str) -> AsyncIterator[AsyncEngine]:
    """The database in the middle of a bad night: a row of each kind, dead letters, positions, a batch."""
    engine = connect(url, "psql")
    for row_id, values in ROWS.items():
        await query(
            engine,
            f"""INSERT INTO email_dispatches (id, "to", subject, content, mailable_type, batch_id, batch_index,
                status, attempts, sent_at, held, doubts, error_message, next_attempt_at)
            VALUES ({row_id}, 'ana@example.com', 's', 'c', 'm', '{BATCH}', {row_id}, {values})""".replace(":", r"\:"),
        )
    for row_id, claim_no in ((42, 0), (43, 7)):
        await query(
            engine,
            f"""INSERT INTO dead_letters (processor, source_stream, source_partition, reason, error, table_name, row_id,
                claim_no) VALUES ('mailer', 'recipients', 0, 'attempts_used_up', 'e', 'email_dispatches', {row_id},
                {claim_no})""",
        )
    for processor, stream in (("splitter", "imports"), ("mailer", "recipients"), ("mailer", "others")):
        await query(
            engine,
            f"""INSERT INTO processor_offsets (processor, stream, partition, next_offset, last_timestamp_ms)
            VALUES ('{processor}', '{stream}', 1, 9, 5)""",
        )
    await query(engine, f"INSERT INTO import_batches (batch_id, total) VALUES ('{BATCH}', 50)")
    yield engine
    await engine.dispose()


async def do(engine: AsyncEngine, statement: str) -> list[dict[str, Any]]:
    """Type it in."""
    async with engine.begin() as connection:
        result = await connection.exec_driver_sql(statement)
        return [dict(row) for row in result.mappings()] if result.returns_rows else []


async def recipe(engine: AsyncEngine, heading: str, number: int) -> list[dict[str, Any]]:
    """Do what the page says under a heading, statement `number` from 0."""
    return await do(engine, [statement for under, statement in STATEMENTS if under == heading][number])


_STATES = """SELECT id, status, attempts, held, sent_at IS NOT NULL AS sent, next_attempt_at IS NOT NULL AS later
    FROM email_dispatches"""


def _states(rows: Sequence[Any]) -> dict[int, tuple[Any, ...]]:
    return {
        row["id"]: (row["status"], row["attempts"], bool(row["held"]), bool(row["sent"]), bool(row["later"]))
        for row in rows
    }


async def states(engine: AsyncEngine) -> dict[int, tuple[Any, ...]]:
    """Status, attempts, held, and whether it has a time of sending or of its next attempt."""
    return _states(await query(engine, _STATES))


DUE = ("pending", 0, False, False, False)


async def test_every_statement_runs_and_touches_nothing_that_was_sent_or_is_held(engine: AsyncEngine) -> None:
    """At night nobody mends SQL; and no statement for 42 or for all that failed may reach the others."""
    before = await states(engine)
    for _, statement in STATEMENTS:
        if statement.startswith("-- PostgreSQL") and dialect(engine) == "sqlite":
            continue
        async with engine.connect() as connection, connection.begin() as transaction:
            await connection.exec_driver_sql(statement)
            after = _states((await connection.exec_driver_sql(_STATES)).mappings().all())
            await transaction.rollback()
        assert {n: after[n] for n in (44, 45, 46)} == {n: before[n] for n in (44, 45, 46)}, statement


async def test_one_is_retried_when_named(engine: AsyncEngine) -> None:
    """A complete retry, and of nobody else."""
    before = await states(engine)
    await recipe(engine, "Failed mails", 2)
    assert await states(engine) == before | {42: DUE}


async def test_all_failed_and_not_held_are_retried_when_all_are_meant(engine: AsyncEngine) -> None:
    """For all, for those of a batch, and for those of one cause."""
    before = await states(engine)
    await recipe(engine, "Failed mails", 5)
    assert await states(engine) == before | {42: DUE}
    await recipe(engine, "Failed mails", 4)
    assert await states(engine) == before | {42: DUE, 43: DUE}
    await do(engine, "UPDATE email_dispatches SET status = 'failed', attempts = 3 WHERE id IN (42, 43)")
    await recipe(engine, "Failed mails", 3)
    assert await states(engine) == before | {42: DUE, 43: DUE}


async def test_a_time_typed_by_a_person_is_understood(engine: AsyncEngine) -> None:
    """The row waits until then, and programs read the time as the same moment on both databases."""
    await recipe(engine, "Failed mails", 6)
    table = EmailDispatch.__table__  # type: ignore[attr-defined]
    async with engine.connect() as connection:
        found = await connection.scalar(select(table.c.next_attempt_at).where(table.c.id == 42))
    assert found is not None
    assert found.isoformat() == "2027-01-02T08:00:00+00:00"
    assert (await states(engine))[42] == ("pending", 0, False, False, True)


async def test_a_waiting_row_is_due_when_it_is_called(engine: AsyncEngine) -> None:
    """Not before its time becomes now."""
    await do(engine, "UPDATE email_dispatches SET id = 1 WHERE id = 42")
    await do(engine, "UPDATE email_dispatches SET id = 42 WHERE id = 41")
    await recipe(engine, "Failed mails", 7)
    assert (await states(engine))[42] == DUE


async def test_a_careless_retry_is_refused_as_a_whole(engine: AsyncEngine) -> None:
    """The page says: nothing at all was changed."""
    before = await states(engine)
    with pytest.raises(IntegrityError, match="ck_email_dispatches_pending_never_sent_nor_held"):
        await do(engine, "UPDATE email_dispatches SET status = 'pending', attempts = 0")
    assert await states(engine) == before


async def test_only_open_dead_letters_are_shown(engine: AsyncEngine) -> None:
    """The letter of 43 belongs to an earlier try; a retry closes that of 42."""
    assert [row["row_id"] for row in await recipe(engine, "Dead letters", 1)] == [42]
    await recipe(engine, "Failed mails", 2)
    assert await recipe(engine, "Dead letters", 1) == []


async def test_a_held_mail_ends_as_a_person_decides(engine: AsyncEngine) -> None:
    """It arrived, or it is released; and a sent one is sent again only when that is said."""
    assert [row["id"] for row in await recipe(engine, "Held", 0)] == [44]
    await do(engine, "UPDATE email_dispatches SET id = 1 WHERE id = 42")
    await do(engine, "UPDATE email_dispatches SET id = 42 WHERE id = 44")
    await recipe(engine, "Held", 1)
    assert (await states(engine))[42] == ("sent", 1, False, True, False)
    await recipe(engine, "Held", 2)
    assert (await states(engine))[42] == ("sent", 1, False, True, False)
    await recipe(engine, "Held", 3)
    assert (await states(engine))[42] == DUE


async def test_a_held_mail_is_sent_again_when_it_is_released(engine: AsyncEngine) -> None:
    """The other decision."""
    await do(engine, "UPDATE email_dispatches SET id = 1 WHERE id = 42")
    await do(engine, "UPDATE email_dispatches SET id = 42 WHERE id = 44")
    await recipe(engine, "Held", 2)
    assert (await states(engine))[42] == DUE


async def test_everyone_in_doubt_is_listed(engine: AsyncEngine) -> None:
    """Counted doubts, and leases that have lapsed and were not taken up yet."""
    await do(engine, "UPDATE email_dispatches SET lease_until = '2026-01-01 00:00:00+00:00' WHERE id = 41")
    assert [row["id"] for row in await recipe(engine, "In doubt", 0)] == [44, 45]
    assert [row["id"] for row in await recipe(engine, "In doubt", 1)] == [41]


async def test_one_partition_goes_on_where_it_is_told(engine: AsyncEngine) -> None:
    """A new epoch, no memory of the record before, and no other partition."""
    await recipe(engine, "A partition is halted", 0)
    moved = await query(engine, "SELECT * FROM processor_offsets WHERE epoch = 1")
    assert [(row["processor"], row["stream"], row["next_offset"], row["last_timestamp_ms"]) for row in moved] == [
        ("mailer", "recipients", 0, None)
    ]


async def test_pause_and_resume_are_one_statement_each(engine: AsyncEngine) -> None:
    """All partitions of that processor and of no other."""
    await recipe(engine, "Pause and resume", 0)
    paused = await query(engine, "SELECT * FROM processor_offsets WHERE paused")
    assert {row["processor"] for row in paused} == {"mailer"}
    await recipe(engine, "Pause and resume", 1)
    assert await query(engine, "SELECT * FROM processor_offsets WHERE paused") == []
