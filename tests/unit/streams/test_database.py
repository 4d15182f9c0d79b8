"""The door to the database on SQLite, and which errors mean "later"."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import exc, text
from sqlalchemy.ext.asyncio import AsyncEngine

from streams.database import connect, dialect, driver_connection, is_away
from streams.errors import BadSettings


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    """A file with one table of numbers."""
    engine = connect(f"sqlite+aiosqlite:///{tmp_path / 'a.db'}", "test")
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE numbers (n INTEGER)"))
    yield engine
    await engine.dispose()


async def numbers(engine: AsyncEngine) -> list[int]:
    """What is committed, as seen by a session of its own."""
    async with engine.connect() as connection:
        return list((await connection.execute(text("SELECT n FROM numbers ORDER BY n"))).scalars())


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("no url", "not a URL"),
        ("mysql://db.example.com/a", "postgresql\\+asyncpg"),
        ("postgresql://u:secret@db.example.com/a", "postgresql\\+asyncpg"),
        ("postgresql+asyncpg://db.example.com", "names no database"),
        ("sqlite+aiosqlite://", "names no database"),
        ("sqlite+aiosqlite:///:memory:", "in memory"),
        ("sqlite+aiosqlite:////nowhere/at/all/a.db", "no folder"),
    ],
)
def test_a_wrong_url_is_refused_without_showing_its_password(url: str, says: str) -> None:
    """The message names the setting and what is wrong with it."""
    with pytest.raises(BadSettings, match=f"DATABASE_URL.*{says}") as refused:
        connect(url, "test")
    assert "secret" not in str(refused.value)


async def test_sqlite_is_durable_and_lets_readers_pass(engine: AsyncEngine) -> None:
    """WAL, fsync at each commit, foreign keys."""
    assert dialect(engine) == "sqlite"
    async with engine.connect() as connection:
        for pragma, value in (("journal_mode", "wal"), ("synchronous", 2), ("foreign_keys", 1)):
            assert (await connection.execute(text(f"PRAGMA {pragma}"))).scalar() == value


async def test_two_writers_wait_for_each_other_when_both_read_first(engine: AsyncEngine) -> None:
    """With deferred transactions one of the two would fail with "database is locked" at once."""
    async with engine.begin() as connection:
        await connection.execute(text("INSERT INTO numbers VALUES (0)"))

    async def add_one() -> None:
        async with engine.begin() as connection:
            n = (await connection.execute(text("SELECT n FROM numbers"))).scalar_one()
            await connection.execute(text("UPDATE numbers SET n = :n"), {"n": n + 1})

    await asyncio.gather(*(add_one() for _ in range(8)))
    assert await numbers(engine) == [8]


async def test_the_drivers_connection_commits_what_it_is_told(engine: AsyncEngine) -> None:
    """Its transactions are explicit."""
    async with driver_connection(engine) as connection:
        await connection.execute("BEGIN IMMEDIATE")
        await connection.execute("INSERT INTO numbers VALUES (1)")
        await connection.commit()
    assert await numbers(engine) == [1]


async def test_an_open_transaction_is_an_error_and_its_connection_is_thrown_away(engine: AsyncEngine) -> None:
    """A forgotten commit looks like success and loses writes."""

    async def forget() -> None:
        async with driver_connection(engine) as connection:
            await connection.execute("BEGIN IMMEDIATE")
            await connection.execute("INSERT INTO numbers VALUES (1)")

    with pytest.raises(RuntimeError, match="left open"):
        await forget()
    assert await numbers(engine) == []


async def test_the_connection_is_put_back_when_an_ordinary_error_leaves_no_transaction(engine: AsyncEngine) -> None:
    """Wrong SQL says nothing against the connection."""
    async with driver_connection(engine) as connection:
        first = connection
    with pytest.raises(sqlite3.OperationalError):
        async with driver_connection(engine) as connection:
            await connection.execute("SELEC 1")
    async with driver_connection(engine) as connection:
        assert connection is first


async def test_nothing_is_locked_when_a_task_was_cancelled_in_its_transaction(engine: AsyncEngine) -> None:
    """The connection is closed, its writes are undone, and the next writer gets the lock."""
    inside = asyncio.Event()

    async def write() -> None:
        async with driver_connection(engine) as connection:
            await connection.execute("BEGIN IMMEDIATE")
            await connection.execute("INSERT INTO numbers VALUES (1)")
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(write())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with engine.begin() as connection:
        await connection.execute(text("INSERT INTO numbers VALUES (2)"))
    assert await numbers(engine) == [2]


def sqlite_error(code: int) -> sqlite3.OperationalError:
    """As the driver raises it."""
    error = sqlite3.OperationalError("x")
    error.sqlite_errorcode = code
    return error


def wrapped(error: Exception) -> exc.DBAPIError:
    """As SQLAlchemy passes it on."""
    return exc.DBAPIError("SELECT 1", None, error)


AWAY = [
    ConnectionRefusedError(),
    ConnectionResetError(),
    TimeoutError(),
    asyncpg.ConnectionDoesNotExistError("closed in the middle of operation"),
    asyncpg.CannotConnectNowError("starting up"),
    asyncpg.AdminShutdownError("terminating"),
    asyncpg.ReadOnlySQLTransactionError("read-only"),
    asyncpg.TooManyConnectionsError("too many"),
    asyncpg.DeadlockDetectedError("deadlock"),
    asyncpg.InterfaceError("connection is closed"),
    asyncpg.InvalidCachedStatementError("a migration changed the table"),
    asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress"),
    wrapped(asyncpg.ReadOnlySQLTransactionError("read-only")),
    exc.TimeoutError("QueuePool limit"),
    sqlite_error(sqlite3.SQLITE_BUSY),
    sqlite_error(sqlite3.SQLITE_BUSY_SNAPSHOT),
    sqlite_error(sqlite3.SQLITE_FULL),
    sqlite_error(sqlite3.SQLITE_IOERR_FSYNC),
    wrapped(sqlite_error(sqlite3.SQLITE_READONLY)),
]
OURS = [
    ValueError("x"),
    KeyError("x"),
    asyncpg.PostgresSyntaxError("syntax"),
    asyncpg.UniqueViolationError("unique"),
    asyncpg.CheckViolationError("check"),
    asyncpg.InvalidPasswordError("password"),
    asyncpg.InvalidCatalogNameError("no such database"),
    asyncpg.InterfaceError("cannot perform operation: another operation is in progress"),
    wrapped(asyncpg.UndefinedColumnError("column")),
    exc.ArgumentError("x"),
    sqlite_error(sqlite3.SQLITE_ERROR),
    sqlite3.IntegrityError("unique"),
    asyncio.CancelledError(),
]


@pytest.mark.parametrize("error", AWAY, ids=repr)
def test_the_database_is_away_when_trying_again_may_help(error: BaseException) -> None:
    """Connection, failover, start and stop, resources, locks."""
    assert is_away(error)


@pytest.mark.parametrize("error", OURS, ids=repr)
def test_the_database_is_not_away_when_the_mistake_is_ours(error: BaseException) -> None:
    """The same statement would fail again."""
    assert not is_away(error)


async def test_driver_commits_each_statement_when_a_reader_had_asked_for_autocommit(engine: AsyncEngine) -> None:
    """A level that somebody asked for ends with his use of the connection: the driver must not open transactions."""
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        await connection.execute(text("SELECT n FROM numbers"))

    async with driver_connection(engine) as driver:
        await driver.execute("INSERT INTO numbers VALUES (1)")

    assert await numbers(engine) == [1]
