"""A migrated database of one's own for each test, once of each kind."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from streams.database import connect
from streams.testing import MemoryLog
from tests.support.databases import Migrated
from tests.support.engine import Stage


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Migrated]:
    """Migrated databases to copy."""
    databases = Migrated(tmp_path_factory.mktemp("migrated"))
    yield databases
    databases.drop()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, migrated: Migrated, tmp_path: Path) -> Iterator[str]:
    """DATABASE_URL of a migrated database, once of each kind."""
    if request.param == "postgresql":
        request.getfixturevalue("services")
        yield migrated.shared()
        return
    with migrated.copy("sqlite", tmp_path) as url:
        yield url


@pytest.fixture
def postgres_database(services: object, migrated: Migrated, tmp_path: Path) -> Iterator[str]:
    """The same for what only PostgreSQL has."""
    with migrated.copy("postgresql", tmp_path) as url:
        yield url


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """An engine as a process of ours has it."""
    engine = connect(database_url, "afluente-test")
    yield engine
    await engine.dispose()


@pytest.fixture
async def postgres(postgres_database: str) -> AsyncIterator[AsyncEngine]:
    """An engine on PostgreSQL."""
    engine = connect(postgres_database, "afluente-test")
    yield engine
    await engine.dispose()


@pytest.fixture
async def stage(engine: AsyncEngine) -> AsyncIterator[Stage]:
    """A processor between a log in memory with one partition and a database."""
    stage = Stage(engine, MemoryLog())
    await stage.declare()
    yield stage
    await stage.log.close()


@pytest.fixture
async def postgres_stage(postgres: AsyncEngine) -> AsyncIterator[Stage]:
    """The same on PostgreSQL."""
    stage = Stage(postgres, MemoryLog())
    await stage.declare()
    yield stage
    await stage.log.close()


@pytest.fixture
def sqlite_database(migrated: Migrated, tmp_path: Path) -> Iterator[str]:
    """A database for what only SQLite has."""
    with migrated.copy("sqlite", tmp_path) as url:
        yield url


@pytest.fixture
async def sqlite_stage(sqlite_database: str) -> AsyncIterator[Stage]:
    """The same on SQLite."""
    engine = connect(sqlite_database, "afluente-test")
    stage = Stage(engine, MemoryLog())
    await stage.declare()
    yield stage
    await stage.log.close()
    await engine.dispose()
