"""The door to the database on a real PostgreSQL: failover, cancellation, zones."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from sqlalchemy import exc, text
from sqlalchemy.ext.asyncio import AsyncEngine

from streams.database import connect, dialect, driver_connection, is_away


@pytest.fixture
async def engine(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    """A database with one table of numbers."""
    engine = connect(postgres_url, "afluente-test")
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE numbers (n INTEGER)"))
    yield engine
    await engine.dispose()


@pytest.fixture
async def admin(postgres_url: str) -> AsyncIterator[asyncpg.Connection]:
    """A session of somebody else."""
    connection = await asyncpg.connect(postgres_url.replace("+asyncpg", ""))
    yield connection
    await connection.close()


async def set_read_only(admin: asyncpg.Connection, value: str) -> None:
    """What every new session of this database will be; sessions that exist stay as they are."""
    database = await admin.fetchval("SELECT current_database()")
    await admin.execute("SET default_transaction_read_only = off")
    await admin.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = {value}")


async def fill_pool(engine: AsyncEngine) -> None:
    """Open as many connections as the pool keeps, and put them back."""
    open_ones = [await engine.connect() for _ in range(5)]
    for each in open_ones:
        await each.close()


async def test_sessions_are_named_and_in_utc_whatever_the_database_says(
    engine: AsyncEngine, admin: asyncpg.Connection
) -> None:
    """now() in a column without zone is UTC, also where the database is in New York."""
    database = await admin.fetchval("SELECT current_database()")
    await admin.execute(f"ALTER DATABASE {database} SET timezone = 'America/New_York'")
    await engine.dispose()
    async with driver_connection(engine) as connection:
        assert dialect(engine) == "postgresql"
        assert await connection.fetchval("SHOW timezone") == "UTC"
        assert await connection.fetchval("SHOW application_name") == "afluente-test"
        local = await connection.fetchval("SELECT now()::timestamp")
        assert abs(local.replace(tzinfo=UTC) - datetime.now(UTC)) < timedelta(minutes=1)


@pytest.mark.parametrize("way", ["sqlalchemy", "driver"])
async def test_writes_recover_after_one_refusal_when_the_server_had_become_read_only(
    engine: AsyncEngine, admin: asyncpg.Connection, way: str
) -> None:
    """The whole pool leads to a server that answers pings and refuses writes; then a writable one has its name."""

    async def write() -> None:
        if way == "driver":
            async with driver_connection(engine) as connection:
                await connection.execute("INSERT INTO numbers VALUES (1)")
        else:
            async with engine.begin() as other:
                await other.execute(text("INSERT INTO numbers VALUES (1)"))

    await set_read_only(admin, "on")
    await engine.dispose()
    await fill_pool(engine)
    await set_read_only(admin, "off")
    with pytest.raises((exc.DBAPIError, asyncpg.PostgresError)) as refused:
        await write()
    assert is_away(refused.value)
    for _ in range(5):
        await write()
    assert await admin.fetchval("SELECT count(*) FROM numbers") == 5


@pytest.mark.parametrize("way", ["sqlalchemy", "driver"])
async def test_a_lost_connection_is_away_and_the_next_one_works(
    engine: AsyncEngine, admin: asyncpg.Connection, way: str
) -> None:
    """The server ends the session in mid-statement."""

    async def sleep() -> None:
        if way == "driver":
            async with driver_connection(engine) as connection:
                await connection.execute("SELECT pg_sleep(60)")
        else:
            async with engine.begin() as other:
                await other.execute(text("SELECT pg_sleep(60)"))

    task = asyncio.create_task(sleep())
    kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%'"
    while not await admin.fetch(kill):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    with pytest.raises(Exception) as lost:  # noqa: PT011
        await task
    assert is_away(lost.value)
    async with engine.begin() as connection:
        await connection.execute(text("INSERT INTO numbers VALUES (1)"))


async def test_what_was_reported_as_saved_is_saved_when_commits_are_cancelled(
    engine: AsyncEngine, admin: asyncpg.Connection
) -> None:
    """Tasks are cancelled at every moment of a transaction, also twice; the same pool goes on."""
    saved: list[int] = []

    async def save(n: int) -> None:
        async with driver_connection(engine) as connection:
            async with connection.transaction():
                await connection.execute("INSERT INTO numbers VALUES ($1)", n)
            saved.append(n)

    for n in range(120):
        task = asyncio.create_task(save(n))
        for _ in range(n % 40):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    for n in range(1000, 1010):
        await save(n)
    stored = {row["n"] for row in await admin.fetch("SELECT n FROM numbers")}
    assert set(saved) <= stored
    assert stored >= set(range(1000, 1010))
    idle = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%' AND application_name = $1"
    for _ in range(200):
        if await admin.fetchval(idle, "afluente-test") == 0:
            break
        await asyncio.sleep(0.05)
    assert await admin.fetchval(idle, "afluente-test") == 0


async def test_a_refused_connection_is_away(unused_tcp_port: int) -> None:
    """Nobody listens there."""
    engine = connect(f"postgresql+asyncpg://postgres@127.0.0.1:{unused_tcp_port}/a", "test")
    with pytest.raises(OSError) as refused:  # noqa: PT011
        async with driver_connection(engine):
            pass
    assert is_away(refused.value)
    await engine.dispose()


async def test_a_database_that_does_not_exist_is_not_away(postgres_url: str) -> None:
    """Waiting would not help: a person must act."""
    engine = connect(postgres_url + "_not", "test")
    with pytest.raises(exc.DBAPIError, match="does not exist") as refused:
        async with driver_connection(engine):
            pass
    assert not is_away(refused.value)
    await engine.dispose()
