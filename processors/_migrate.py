"""Bring the database to the newest revision, one process at a time, however many start at once.

Alembic is imported by those who migrate only: it costs 12 MB and 0.4 s, and every process looks at its start whether
the database is migrated.
"""

import asyncio
import fcntl
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from sqlalchemy import Connection, inspect, text
from sqlalchemy.ext.asyncio import AsyncEngine

from streams.database import connect, dialect

if TYPE_CHECKING:
    from alembic.config import Config

ROOT = Path(__file__).resolve().parent.parent
ADVISORY_LOCK = 0x41464C55454E5445  # "AFLUENTE"; PostgreSQL keeps advisory locks per database
POLL_SECONDS = 0.2

logger = logging.getLogger(__name__)


async def migrate(url: str, revision: str = "head") -> bool:
    """Upgrade to `revision`; True when this process did it, False when there was nothing left to do.

    Processes that come at the same time wait for the one that upgrades. One that finds the database at `revision`
    takes no lock. Raises what alembic and the database raise.
    """
    engine = connect(url, "afluente-migrate")
    try:
        if await _is_at(engine, revision):
            return False
        async with _alone(engine):
            if await _is_at(engine, revision):
                return False
            await _run(engine, lambda command, config: command.upgrade(config, revision))
            return True
    finally:
        await engine.dispose()


async def downgrade(url: str, revision: str) -> None:
    """Go back to `revision` ("base", "-1", "0002"). Each revision says what is lost. Stop the engine first."""
    engine = connect(url, "afluente-migrate")
    try:
        async with _alone(engine):
            await _run(engine, lambda command, config: command.downgrade(config, revision))
    finally:
        await engine.dispose()


async def current_is_head(engine: AsyncEngine) -> bool:
    """True when the database is at the newest revision that this code knows, or at one of a newer release."""
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")  # waits for no writer, keeps no snapshot open
        current = await connection.run_sync(_recorded)
    known, head = revisions()
    if current is not None and current not in known:
        _warn_of_newer(current)
        return True
    return current == head


def revisions() -> tuple[set[str], str]:
    """All revisions, and the newest of them: read from the files, which each say their own and the one before."""
    files = [path.read_text("utf-8") for path in (ROOT / "alembic" / "versions").glob("*.py")]
    own, before = (
        {found[1] for text in files if (found := re.search(rf'^{name} = "(\w+)"', text, re.MULTILINE))}
        for name in ("revision", "down_revision")
    )
    [head] = own - before
    return own, head


def _recorded(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return revision


def _warn_of_newer(revision: str) -> None:
    logger.warning("the database is at revision %s, which this release does not know: a newer one migrated", revision)


# ---- alembic


def _config(connection: Connection | None = None) -> "Config":
    from alembic.config import Config  # noqa: PLC0415 - see the top

    config = Config(ROOT / "alembic.ini")
    config.attributes["connection"] = connection
    return config


async def _run(engine: AsyncEngine, work: Callable[[Any, "Config"], None]) -> None:
    from alembic import command  # noqa: PLC0415 - see the top

    async with engine.connect() as connection:
        await connection.run_sync(lambda sync: work(command, _config(sync)))


async def _is_at(engine: AsyncEngine, revision: str) -> bool:
    """Whether `revision` is among what the database has; a database ahead of this code (a newer release) has it too."""
    from alembic.migration import MigrationContext  # noqa: PLC0415 - see the top
    from alembic.script import ScriptDirectory  # noqa: PLC0415 - see the top

    script = ScriptDirectory.from_config(_config())
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")  # waits for no writer, keeps no snapshot open
        current = await connection.run_sync(lambda sync: MigrationContext.configure(sync).get_current_revision())
    if current is None:
        return False
    known = [each.revision for each in script.walk_revisions("base", "heads")]
    if current not in known:
        _warn_of_newer(current)
        return True
    target = script.get_revision(revision).revision
    return any(each.revision == target for each in script.iterate_revisions(current, "base"))


# ---- one at a time


def _alone(engine: AsyncEngine) -> AbstractAsyncContextManager[None]:
    return _advisory_lock(engine) if dialect(engine) == "postgresql" else _file_lock(Path(engine.url.database or ""))


@asynccontextmanager
async def _advisory_lock(engine: AsyncEngine) -> AsyncIterator[None]:
    """A lock of the session, gone with its process.

    Asked for again and again rather than waited for: CREATE INDEX CONCURRENTLY waits for every open statement, also for
    one that waits for this lock, and the two would wait for each other.
    """
    async with engine.connect() as session:
        await session.execution_options(isolation_level="AUTOCOMMIT")
        while not await session.scalar(text(f"SELECT pg_try_advisory_lock({ADVISORY_LOCK})")):  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        try:
            yield
        finally:
            await session.execute(text(f"SELECT pg_advisory_unlock({ADVISORY_LOCK})"))


@asynccontextmanager
async def _file_lock(database: Path) -> AsyncIterator[None]:
    """A lock on a file beside the database, gone with its process. The file stays: to delete it would be a race."""
    with database.with_name(database.name + ".migrate-lock").open("a") as file:
        while not _locked(file):  # noqa: ASYNC110 - the event is in another process
            await asyncio.sleep(POLL_SECONDS)
        yield


def _locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
