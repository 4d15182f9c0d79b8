"""How processors run side by side, and how they end together."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from processors import _compose, _serve
from processors._compose import Entry, Runner
from processors._house import House
from processors._serve import run_processors
from processors._settings import Settings
from streams.database import connect
from streams.errors import DatabaseAway
from streams.exit_codes import ExitCode, exit_code
from streams.telemetry import Metrics
from streams.testing import MemoryLog


class Worker:
    """A processor that finishes what it has when it is asked to stop."""

    def __init__(self) -> None:
        self.finished = False

    async def run(self, stop: asyncio.Event) -> None:
        """Wait, finish."""
        await stop.wait()
        await asyncio.sleep(0)
        self.finished = True


class Failing:
    """A processor whose database goes away."""

    async def run(self, stop: asyncio.Event) -> None:
        """Fail, within a task as the engine does."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._fail())

    async def _fail(self) -> None:
        raise DatabaseAway("gone")


@pytest.fixture
def house(tmp_path: Path) -> House:
    """A log in memory; nothing is asked of the database."""
    url = f"sqlite+aiosqlite:///{tmp_path / 'a.db'}"
    settings = Settings(_env_file=None, database_url=url, log_url="embedded:///unused.db")
    return House(settings, MemoryLog(), connect(url, "test"), Metrics())


def known(monkeypatch: pytest.MonkeyPatch, **runners: Runner) -> list[str]:
    """Let these be all processors that there are."""

    def build(runner: Runner) -> Callable[[House], Runner]:
        return lambda house: runner

    entries = {name: Entry(build(runner), (_compose.imports_spec,)) for name, runner in runners.items()}
    monkeypatch.setattr(_serve, "PROCESSORS", entries)
    return list(runners)


async def test_others_finish_what_they_have_when_one_ends_with_an_error(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mail in flight is recorded; cancelled it would be in doubt."""
    worker = Worker()
    names = known(monkeypatch, worker=worker, failing=Failing())

    with pytest.raises(BaseExceptionGroup) as ended:
        await run_processors(house, names, asyncio.Event())

    assert worker.finished
    assert exit_code(ended.value) is ExitCode.DATABASE_AWAY


async def test_streams_are_there_when_a_processor_starts(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each processor declares what it needs, so that any of them may be started first."""
    names = known(monkeypatch, worker=Worker())
    stop = asyncio.Event()
    stop.set()

    await run_processors(house, names, stop)

    assert await house.log.partitions("imports")


async def test_readiness_says_why_when_the_log_is_not_connected(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """All reasons at once; a database without tables is one as well."""
    assert isinstance(house.log, MemoryLog)
    house.log.connected = False

    reasons = await _serve.unready(house, ["mailer"])
    await house.engine.dispose()

    assert reasons[0] == "the log is not connected"
    assert reasons[1].startswith("the database does not answer")
