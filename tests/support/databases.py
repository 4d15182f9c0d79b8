"""Migrated databases by the dozen: made once, then copied for each test; and plain SQL for looking at them."""

import asyncio
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from models.tables import metadata
from processors._migrate import migrate
from scripts.devservices import places
from streams.database import dialect
from streams.sql import later

SERVER = f"{places.HOST}:{places.POSTGRES_PORT}"


class Migrated:
    """One database of each kind, migrated when it is first asked for; `copy` hands out copies of it."""

    def __init__(self, folder: Path) -> None:
        self._sqlite = folder / "migrated.db"
        self._postgres: str | None = None
        self._shared: str | None = None

    @contextmanager
    def copy(self, kind: str, folder: Path) -> Iterator[str]:
        """DATABASE_URL of a migrated, empty database of one's own for the time of the block."""
        if kind == "sqlite":
            if not self._sqlite.exists():
                asyncio.run(migrate(f"sqlite+aiosqlite:///{self._sqlite}"))
            mine = folder / f"{uuid.uuid4().hex}.db"
            shutil.copy(self._sqlite, mine)
            yield f"sqlite+aiosqlite:///{mine}"
            return
        name = f"test_{uuid.uuid4().hex}"
        asyncio.run(_administer(f"CREATE DATABASE {name} TEMPLATE {self._template()}"))
        try:
            yield f"postgresql+asyncpg://postgres@{SERVER}/{name}"
        finally:
            asyncio.run(_administer(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))

    def shared(self) -> str:
        """DATABASE_URL of a PostgreSQL database that all who ask share, one after the other; emptied for each.

        A copy takes a second, and most tests need no more than empty tables.
        """
        if self._shared is None:
            self._shared = f"test_{uuid.uuid4().hex}"
            asyncio.run(_administer(f"CREATE DATABASE {self._shared} TEMPLATE {self._template()}"))
        asyncio.run(_clear(self._shared))
        return f"postgresql+asyncpg://postgres@{SERVER}/{self._shared}"

    def drop(self) -> None:
        """Leave nothing on the server."""
        for name in (self._shared, self._postgres):
            if name is not None:
                asyncio.run(_administer(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))

    def _template(self) -> str:
        if self._postgres is None:
            name = f"test_{uuid.uuid4().hex}"
            asyncio.run(_administer(f"CREATE DATABASE {name}"))
            self._postgres = name
            asyncio.run(migrate(f"postgresql+asyncpg://postgres@{SERVER}/{name}"))
        return self._postgres


async def _administer(statement: str) -> None:
    connection = await asyncpg.connect(f"postgresql://postgres@{SERVER}/postgres")
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


async def _clear(name: str) -> None:
    """Empty every table, whatever a test left open."""
    connection = await asyncpg.connect(f"postgresql://postgres@{SERVER}/{name}")
    try:
        others = "FROM pg_stat_activity WHERE datname = $1 AND pid <> pg_backend_pid()"
        await connection.execute(f"SELECT pg_terminate_backend(pid) {others}", name)
        await connection.execute(f"TRUNCATE {', '.join(metadata.tables)} RESTART IDENTITY")
    finally:
        await connection.close()


async def query(engine: AsyncEngine, statement: str, **parameters: object) -> list[dict[str, Any]]:
    """One statement in its own transaction, as a person would type it; its rows as dicts."""
    async with engine.begin() as connection:
        result = await connection.execute(text(statement), parameters)
        return [dict(row) for row in result.mappings()] if result.returns_rows else []


def from_now(engine: AsyncEngine, seconds: float) -> str:
    """SQL: the database's time plus so many seconds."""
    return later(dialect(engine), str(seconds))
