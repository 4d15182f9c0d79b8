"""The embedded log when a process beside the test publishes, reads, and is killed with SIGKILL."""

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from streams.embedded import EmbeddedLog
from streams.errors import LogInUse
from streams.log import Partition, StreamSpec
from streams.testing import NotingOwner, collect

CHILD = Path(__file__).with_name("embedded_child.py")
LIMIT = 30.0


class Child:
    """A running `embedded_child.py`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def line(self) -> str:
        """The next line that it says."""
        assert self._process.stdout
        line = await asyncio.wait_for(self._process.stdout.readline(), LIMIT)
        assert line, "the child ended by itself"
        return line.decode().strip()

    async def kill(self) -> list[str]:
        """SIGKILL, wherever it is; the lines that it has said and nobody has read."""
        assert self._process.stdout
        self._process.kill()
        rest = await asyncio.wait_for(self._process.stdout.read(), LIMIT)
        await self._process.wait()
        return rest.decode().splitlines()


@asynccontextmanager
async def child(command: str, path: Path) -> AsyncIterator[Child]:
    """Start one; it does not outlive the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(CHILD), command, str(path), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield Child(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[tuple[EmbeddedLog, Partition]]:
    """The log in this process."""
    log = EmbeddedLog(path)
    await log.open()
    await log.declare(StreamSpec("imports"))
    yield log, (await log.partitions("imports"))[0]
    await log.close()


async def stored(path: Path) -> list[int]:
    """The numbers of all messages that the file holds."""
    async with opened(path) as (log, partition):
        bounds = await log.bounds(partition)
        subscription = await log.subscribe(partition, "auditors", NotingOwner())
        return [int(record.data) for record in await collect(subscription, bounds.next - bounds.first)]


@pytest.mark.parametrize("command", ["publish", "publish-unnamed"])
async def test_confirmed_messages_are_stored_once_when_their_publisher_is_killed(command: str, tmp_path: Path) -> None:
    """Six lives of one publisher on a file: no confirmed message is missing, and no call is stored in part or twice."""
    chance = random.Random(20260101)
    path = tmp_path / "log.db"
    for _ in range(6):
        async with child(command, path) as publisher:
            said = [await publisher.line()]
            await asyncio.sleep(chance.uniform(0, 0.15))  # not a wait: where the kill falls is left to chance
            said += await publisher.kill()
        last_confirmed = int(said[-1].removeprefix("confirmed "))

        numbers = await stored(path)

        assert numbers == list(range(len(numbers)))
        assert len(numbers) > last_confirmed
        assert len(numbers) % 20 == 0


async def test_second_set_of_processors_is_refused_by_name(tmp_path: Path) -> None:
    """The refusal says who has the file; publishing beside it goes on; the death of the first frees the file."""
    path = tmp_path / "log.db"
    async with child("read", path) as first, opened(path) as (log, partition):
        assert await first.line() == "reading"

        with pytest.raises(LogInUse, match=rf"embedded_child\.py read .*process {first.pid}\b"):
            await log.subscribe(partition, "other processors", NotingOwner())
        await (await log.publisher(partition)).publish([b"hello"])
        assert await first.line() == "record hello"
        assert (await log.bounds(partition)).next == 1

        await first.kill()

        subscription = await log.subscribe(partition, "processors", NotingOwner())
        assert [record.data for record in await collect(subscription, 1)] == [b"hello"]


async def test_log_is_made_once_when_several_processes_find_none(tmp_path: Path) -> None:
    """`publish` and `run all` may be the first on a machine at the same moment."""
    path = tmp_path / "log.db"
    async with (
        child("publish-unnamed", path) as one,
        child("publish-unnamed", path) as two,
        child("read", path) as three,
    ):
        for process in (one, two):
            assert (await process.line()).startswith("confirmed")
        lines = [await three.line() for _ in range(41)]
        await one.kill()
        await two.kill()

    assert lines[0] == "reading"
    async with opened(path) as (log, partition):
        assert (await log.bounds(partition)).next >= 40
