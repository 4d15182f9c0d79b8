"""What only the embedded log does: refusing other files, waiting for other writers, the claim."""

import asyncio
import sqlite3
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from streams import _embedded_file
from streams._embedded_file import LogFile
from streams.embedded import EmbeddedLog
from streams.errors import LogError, LogInUse, LogRefused, Unconfirmed
from streams.log import Bounds, Partition, StreamSpec
from streams.testing import NotingOwner, eventually


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the log is."""
    return tmp_path / "log.db"


@pytest.fixture
async def log(path: Path) -> AsyncIterator[EmbeddedLog]:
    """An opened log."""
    log = EmbeddedLog(path)
    await log.open()
    yield log
    await log.close()


async def declare(log: EmbeddedLog) -> Partition:
    """A plain stream."""
    await log.declare(StreamSpec("imports"))
    return (await log.partitions("imports"))[0]


# ---- the file


async def test_file_is_readable_by_its_owner_only(log: EmbeddedLog, path: Path) -> None:
    """It holds names and addresses, also in what SQLite keeps beside it."""
    await declare(log)

    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}

    assert set(modes.values()) == {0o600}, modes


def test_database_of_the_application_is_refused_and_not_touched(path: Path) -> None:
    """The same path in both settings is an easy mistake."""
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE email_dispatches (id INTEGER)")
    connection.close()
    before = path.read_bytes()

    with pytest.raises(LogRefused, match="something else"):
        LogFile(path)

    assert path.read_bytes() == before


def test_file_is_refused_when_it_is_no_database(path: Path) -> None:
    """It is not ours to overwrite."""
    path.write_bytes(b"shopping list\n" * 100)

    with pytest.raises(LogRefused, match="not a database"):
        LogFile(path)


async def test_file_of_a_later_version_is_refused(log: EmbeddedLog, path: Path) -> None:
    """After a downgrade nobody guesses what a table means."""
    await log.close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()

    with pytest.raises(LogRefused, match="99"):
        await log.open()


async def test_missing_folder_is_named_when_the_log_is_opened(tmp_path: Path) -> None:
    """A typo in the path must not make a new folder with an empty log in it."""
    with pytest.raises(LogRefused, match="no such folder"):
        await EmbeddedLog(tmp_path / "no such folder" / "log.db").open()


async def test_every_commit_is_synced_to_the_disk(log: EmbeddedLog) -> None:
    """In WAL mode anything less than FULL loses the last confirmed messages when the power fails."""
    synchronous = await log._writer.run(lambda file: file._one("PRAGMA synchronous"))
    journal = await log._writer.run(lambda file: file._one("PRAGMA journal_mode"))

    assert (synchronous, journal) == ((2,), ("wal",))


async def test_using_a_log_that_is_not_open_is_an_error(path: Path) -> None:
    """Not a hang and not a riddle."""
    with pytest.raises(LogError, match="not open"):
        await EmbeddedLog(path).partitions("imports")


# ---- other writers


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statements give up at once when another connection writes; tries follow quickly."""
    monkeypatch.setattr(_embedded_file, "BUSY_SECONDS", 0.01)
    monkeypatch.setattr("streams.embedded.RETRY_SECONDS", (0.01,))


async def test_named_publisher_tries_until_the_file_can_be_written(
    impatient: None, log: EmbeddedLog, path: Path
) -> None:
    """A full disk or a long transaction of another process delays the splitter and loses nothing."""
    partition = await declare(log)
    publisher = await log.publisher(partition, "splitter")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    publishing = asyncio.create_task(publisher.publish([b"a", b"b"], [1, 2]))
    await eventually(lambda: _check(not log.connected))

    other.execute("ROLLBACK")
    other.close()
    await asyncio.wait_for(publishing, 20)

    assert log.connected
    assert await log.bounds(partition) == Bounds(0, 2)


async def test_publisher_without_a_name_says_so_when_the_file_cannot_be_written(
    impatient: None, log: EmbeddedLog, path: Path
) -> None:
    """The relay releases its rows then, and tries later."""
    partition = await declare(log)
    publisher = await log.publisher(partition)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    with pytest.raises(Unconfirmed, match="locked"):
        await publisher.publish([b"a"])

    other.close()
    assert await log.bounds(partition) == Bounds(0, 0)


async def test_named_publisher_gives_up_when_the_log_is_closed(impatient: None, log: EmbeddedLog, path: Path) -> None:
    """Stopping does not wait for a file that cannot be written."""
    publisher = await log.publisher(await declare(log), "splitter")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    publishing = asyncio.create_task(publisher.publish([b"a"], [1]))
    await eventually(lambda: _check(not log.connected))

    await asyncio.wait_for(log.close(), 20)

    with pytest.raises(LogError):
        await asyncio.wait_for(publishing, 20)
    other.close()


# ---- the claim


async def test_claim_is_free_again_when_the_log_is_closed(log: EmbeddedLog, path: Path) -> None:
    """The next process starts as soon as this one has closed its log; until then it is told who has it."""
    partition = await declare(log)
    other = EmbeddedLog(path)
    await other.open()
    await log.subscribe(partition, "splitter", NotingOwner())
    with pytest.raises(LogInUse, match="already run"):
        await other.subscribe(partition, "another group", NotingOwner())

    await log.close()

    await other.subscribe(partition, "splitter", NotingOwner())
    await other.close()


def _check(condition: bool) -> None:
    assert condition
