"""A migrated database of one's own for each test, once of each kind."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from streams.database import connect
from tests.support.databases import Migrated


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
    with migrated.copy(request.param, tmp_path) as url:
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
