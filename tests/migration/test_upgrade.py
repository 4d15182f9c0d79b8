"""Up from nothing, up from the old service's tables, down, and up again, on both databases."""

from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import inspect
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlmodel import select
from sqlmodel.ext.asyncio.session import AsyncSession

from models.keys import idempotency_key
from models.tables import EmailDispatch
from processors._migrate import current_is_head, downgrade, migrate
from tests.migration.legacy import OTHER, insert, query, registration

ENGINE_TABLES = {"processor_offsets", "dead_letters", "import_batches", "import_slices", "batch_duplicates"}


async def tables(engine: AsyncEngine) -> set[str]:
    """Names of the tables that exist."""
    async with engine.connect() as connection:
        return set(await connection.run_sync(lambda sync: inspect(sync).get_table_names()))


async def dispatches(engine: AsyncEngine) -> dict[int, EmailDispatch]:
    """Id -> row, as the model reads it."""
    async with AsyncSession(engine) as session:
        found = (await session.exec(select(EmailDispatch))).all()
        return {row.id: row for row in found if row.id is not None}


def key(opp_id: int, number: int, address: str) -> str:
    """The key of an import's registration."""
    return idempotency_key("import_registration", opp_id, number, address)


async def test_all_tables_exist_when_an_empty_database_was_migrated(url: str, engine: AsyncEngine) -> None:
    """From nothing to head in one go; a second run finds nothing to do."""
    assert not await current_is_head(engine)
    assert await migrate(url)
    assert await tables(engine) >= ENGINE_TABLES | {"email_dispatches", "audits"}
    assert await current_is_head(engine)
    assert not await migrate(url)


async def test_old_rows_are_sent_with_a_key_where_meta_tells_it_when_migrated(url: str, legacy: AsyncEngine) -> None:
    """Meta null, without address, of odd types, or repeated: each row is sent, and no key is guessed."""
    odd: dict[str, tuple[str | None, str | None]] = {
        "plain": (registration(7301, 10, "Ana@Example.com"), key(7301, 10, "ana@example.com")),
        "ids as strings": (registration("7301", "11", "bia@example.com"), key(7301, 11, "bia@example.com")),
        "duplicate": (registration(7301, "10", "ana@EXAMPLE.com"), None),
        "meta null": (None, None),
        "json null": ("null", None),
        "a list": ("[1, 2]", None),
        "a number": ("42", None),
        "no address": ('{"opp_id": 7301, "registration": 12}', key(7301, 12, "row@example.com")),
        "address null": (registration(7301, 13, None), key(7301, 13, "row@example.com")),
        "address a list": (registration(7301, 14, ["x@example.com"]), key(7301, 14, "row@example.com")),
        "no ids": ('{"agent_email": "ana@example.com"}', None),
        "id a float": (registration(7301.5, 15), None),
        "id a word": (registration("sete", 16), None),
        "id with leading zero": (registration("07301", 17), None),
        "id true": (registration(True, 18), None),
        "id nested": (registration({"a": 1}, 19), None),
        "encoded twice": ('"{\\"opp_id\\": 7301, \\"registration\\": 20}"', key(7301, 20, "row@example.com")),
    }
    ids = {name: await insert(legacy, meta, to="row@example.com") for name, (meta, _) in odd.items()}
    other = await insert(legacy, registration(7301, 99), mailable=OTHER)

    assert await migrate(url)

    rows = await dispatches(legacy)
    assert {name: rows[ids[name]].idempotency_key for name in odd} == {name: want for name, (_, want) in odd.items()}
    assert {row.status for row in rows.values()} == {"sent"}
    assert {row.sent_at for row in rows.values()} == {datetime(2026, 3, 29, 2, 30, tzinfo=UTC)}
    assert rows[other].idempotency_key is None
    assert all((row.attempts, row.claim_no, row.held) == (0, 0, False) for row in rows.values())
    assert await query(legacy, "SELECT * FROM audits") == []


async def test_nothing_changes_for_old_code_when_migrated(url: str, legacy: AsyncEngine) -> None:
    """Its INSERT names old columns only and still works; status stays null, so that nothing mails the row."""
    await migrate(url)
    number = await insert(legacy, registration())
    row = (await dispatches(legacy))[number]
    assert (row.status, row.sent_at, row.idempotency_key) == (None, None, None)
    assert await query(legacy, "SELECT * FROM audits") == []


async def test_rows_are_as_before_when_taken_down_and_up_again(url: str, legacy: AsyncEngine) -> None:
    """Old rows survive; unsent rows do not become sent by going back; the engine's knowledge of sent ones returns."""
    old = await insert(legacy, registration(7301, 1))
    await migrate(url)
    sent, pending, failed = await insert_of_the_engine(legacy)
    before = await dispatches(legacy)

    await downgrade(url, "base")
    remaining = await query(legacy, "SELECT * FROM email_dispatches ORDER BY id")
    assert [row["id"] for row in remaining] == [old, sent]
    assert set(remaining[0]) == set(OLD_COLUMNS)
    assert not await tables(legacy) & ENGINE_TABLES
    meanwhile = await insert(legacy, registration(7301, 5))
    assert meanwhile > failed

    assert await migrate(url)
    after = await dispatches(legacy)
    assert set(after) == {old, sent, pending, failed, meanwhile}
    for number, row in before.items():
        assert after[number].model_dump() == row.model_dump()
    assert after[meanwhile].status == "sent"
    assert not {name for name in await tables(legacy) if "parked" in name}


OLD_COLUMNS = ("id", "to", "subject", "content", "mailable_type", "meta", "dispatched_at", "created_at", "updated_at")


async def insert_of_the_engine(engine: AsyncEngine) -> tuple[int, int, int]:
    """A row in each status, as the engine leaves them."""
    common: dict[str, Any] = {"subject": "s", "content": "c", "mailable_type": "App\\Mail\\ImporteRegistrationMail"}
    at = datetime(2026, 11, 30, 23, 2, 1, 123000, tzinfo=UTC)
    rows = [
        EmailDispatch(to="b@example.com", status="sent", sent_at=at, idempotency_key="b" * 64, claim_no=2,
                      attempts=2, doubts=1, batch_id="f" * 64, batch_index=3, message_id="<m@example.com>", **common),
        EmailDispatch(to="c@example.com", status="pending", idempotency_key="c" * 64, next_attempt_at=at,
                      attempts=1, claim_no=1, meta={"opp_id": 1}, **common),
        EmailDispatch(to="d@example.com", status="failed", held=True, idempotency_key="d" * 64, claim_no=3,
                      error_message="outcome unknown", **common),
    ]  # fmt: skip
    async with AsyncSession(engine, expire_on_commit=False) as session:
        for row in rows:
            session.add(row)
            await session.flush()
        await session.commit()
    first, second, third = (row.id or 0 for row in rows)
    return first, second, third


@pytest.mark.parametrize("revision", ["0001", "0002", "0003", "0004", "0005", "0006", "0007"])
async def test_each_step_can_be_taken_back_alone(url: str, engine: AsyncEngine, revision: str) -> None:
    """Up to head, down to each revision, and up again."""
    await migrate(url)
    await downgrade(url, revision)
    assert not await current_is_head(engine)
    assert await migrate(url)
    assert await current_is_head(engine)


LETTER = """INSERT INTO dead_letters
    (processor, source_stream, source_partition, reason, error, batch_id, item_index, redriven_from)
    VALUES ('splitter', 'imports', 0, 'invalid_registration', 'e', 'b', 7, {})"""


async def test_first_letters_stay_when_dead_letters_are_taken_back(url: str, engine: AsyncEngine) -> None:
    """A registration that was rejected twice has two letters; the older schema holds one, and takes no second."""
    await migrate(url)
    for redriven_from in ("NULL", 1):
        await query(engine, LETTER.format(redriven_from))
    await downgrade(url, "0005")
    assert [row["id"] for row in await query(engine, "SELECT id FROM dead_letters")] == [1]
    await migrate(url)
    [row] = await query(engine, "SELECT redriven_from, first_at FROM dead_letters")
    assert (row["redriven_from"], row["first_at"]) == (None, None)


async def test_migrate_does_nothing_when_a_newer_release_has_migrated(url: str, engine: AsyncEngine) -> None:
    """An old pod that restarts in mid-deploy meets a revision it does not know, and starts."""
    await migrate(url)
    await query(engine, "UPDATE alembic_version SET version_num = '9999'")
    assert not await migrate(url)
    assert await current_is_head(engine)
