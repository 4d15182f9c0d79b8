"""Databases to migrate: new ones of both kinds, and one as the old service left it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from streams.database import connect
from tests.migration.legacy import create_legacy_tables


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """DATABASE_URL of a new, empty database, once of each kind."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'afluente.db'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
async def engine(url: str) -> AsyncIterator[AsyncEngine]:
    """An engine on that database, named `test` in its sessions."""
    engine = connect(url, "test")
    yield engine
    await engine.dispose()


@pytest.fixture
async def legacy(engine: AsyncEngine) -> AsyncEngine:
    """The same, with the tables of the old service in it."""
    await create_legacy_tables(engine)
    return engine
