"""A database for each run: a copy of one that is migrated, holds 20,000 old mails, and is analysed."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg

from bench.places import SERVER
from processors._migrate import migrate

TEMPLATE = f"bench_{os.getpid()}_template"
OLD_ROWS = 20_000

SEED = f"""
SET session_replication_role = replica;
INSERT INTO email_dispatches
    ("to", subject, content, mailable_type, dispatched_at, created_at, updated_at, status, sent_at)
SELECT 'old' || i || '@example.org', 'Old', repeat('x', 200), 'App\\Mail\\ImporteRegistrationMail',
    now(), now(), now(), 'sent', now() FROM generate_series(1, {OLD_ROWS}) AS i;
INSERT INTO audits (event, auditable_type, auditable_id, old_values, new_values, created_at, updated_at)
SELECT 'created', 'App\\Models\\EmailDispatch', i, '{{}}', '{{"status": "sent"}}', now(), now()
FROM generate_series(1, {OLD_ROWS}) AS i;
RESET session_replication_role"""


@dataclass(slots=True)
class Database:
    """One run's database, and a connection to look into it."""

    name: str
    look: Any
    seen: int = OLD_ROWS
    """Rows up to this id are not of the part that is measured."""

    @property
    def url(self) -> str:
        """As DATABASE_URL."""
        return f"postgresql+asyncpg://postgres@{SERVER}/{self.name}"

    @property
    def dsn(self) -> str:
        """As drivers want it."""
        return f"postgresql://postgres@{SERVER}/{self.name}"

    async def sent(self) -> int:
        """How many of the rows in question are sent."""
        query = "SELECT count(*) FROM email_dispatches WHERE id > $1 AND status = 'sent'"
        return int(await self.look.fetchval(query, self.seen))

    async def until_sent(self, count: int, seconds: float, every: float = 0.1) -> None:
        """Wait until so many rows are sent. Raises TimeoutError, which says how many there are."""
        end, seen = asyncio.get_running_loop().time() + seconds, 0
        while (seen := await self.sent()) < count:
            if asyncio.get_running_loop().time() > end:
                raise TimeoutError(f"{seen} of {count} mails after {seconds:.0f} s")
            await asyncio.sleep(every)

    async def settle(self) -> None:
        """The warm-up is over: count from here on, with analysed tables and an empty write-ahead log."""
        self.seen = int(await self.look.fetchval("SELECT coalesce(max(id), 0) FROM email_dispatches"))
        await self.look.execute("VACUUM ANALYZE email_dispatches")
        await self.look.execute("CHECKPOINT")

    async def last_sent_at(self) -> float:
        """When the last of them was recorded, in seconds since 1970."""
        query = "SELECT extract(epoch FROM max(sent_at))::float8 FROM email_dispatches WHERE id > $1"
        return float(await self.look.fetchval(query, self.seen))

    async def check_each_sent_once(self, count: int) -> None:
        """Raise AssertionError unless there are so many rows, each of them sent at its first attempt."""
        query = """SELECT count(*), count(*) FILTER (WHERE status = 'sent'), sum(attempts)
            FROM email_dispatches WHERE id > $1"""
        found = tuple(await self.look.fetchrow(query, self.seen))
        assert found == (count, count, count), f"rows, sent, attempts: {found}, expected {count} of each"


@asynccontextmanager
async def template() -> AsyncIterator[str]:
    """Make what the runs copy; gone at the end. Yields the server's release."""
    await _administer(f"CREATE DATABASE {TEMPLATE}")
    try:
        await migrate(f"postgresql+asyncpg://postgres@{SERVER}/{TEMPLATE}")
        connection = await asyncpg.connect(f"postgresql://postgres@{SERVER}/{TEMPLATE}")
        try:
            await connection.execute(SEED)
            await connection.execute("VACUUM ANALYZE")
            release = str(await connection.fetchval("SHOW server_version"))
        finally:
            await connection.close()
        yield release
    finally:
        await _administer(f"DROP DATABASE IF EXISTS {TEMPLATE} WITH (FORCE)")


@asynccontextmanager
async def fresh(number: int) -> AsyncIterator[Database]:
    """A copy of the template for one run."""
    name = f"bench_{os.getpid()}_{number}"
    await _administer(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
    try:
        look = await asyncpg.connect(f"postgresql://postgres@{SERVER}/{name}")
        try:
            yield Database(name, look)
        finally:
            await look.close()
    finally:
        await _administer(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


async def _administer(statement: str) -> None:
    connection = await asyncpg.connect(f"postgresql://postgres@{SERVER}/postgres")
    try:
        await connection.execute(statement)
    finally:
        await connection.close()
