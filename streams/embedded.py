"""The log of `log.py` on one SQLite file: durable, for one machine, with nothing to install.

All processors of a file run in one process; the first subscription claims it. Publishing, bounds and the like work from
any process beside it. The file must be on a local disk: SQLite's locks and shared memory do not work over a network.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from streams._embedded_claim import Claim
from streams._embedded_file import LogFile
from streams._paged import PagedSubscription, read_pages
from streams._publishing import check_call
from streams.errors import LogError, Unconfirmed
from streams.log import Bounds, Owner, Partition, Publisher, Record, StreamSpec

T = TypeVar("T")

LOOK_SECONDS = 0.1
"""So often a process looks whether another one has published: one PRAGMA that reads a counter in shared memory."""

TRANSACTION_MESSAGES = 1_000
TRANSACTION_BYTES = 8 * 1024**2
"""A call of `publish` is stored in transactions of up to these sizes, so that others get their turn in between."""

RETRY_SECONDS = (0.1, 0.5, 1.0, 2.0, 5.0)
"""Waits between tries of what must not be given up (the disk is full, another process writes); the last repeats."""

CLOSE_SECONDS = 10.0

log = logging.getLogger(__name__)


class EmbeddedLog:
    """A `Log` in the file `path`, whose folder must exist. `wall` tells the time of records, in seconds since 1970."""

    def __init__(self, path: Path, wall: Callable[[], float] = time.time) -> None:
        self._claim = Claim(path)
        self._writer = _Thread(path, wall)
        self._reader = _Thread(path, wall)
        self._turns: dict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._subscriptions: list[PagedSubscription] = []
        self._looking: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """False while the file cannot be read or written."""
        return self._writer.works and self._reader.works

    async def open(self) -> None:
        """Open the file, make it if it is missing, and drop what retention no longer keeps."""
        await self._writer.open()
        await self._reader.open()
        try:
            await self._writer.run(LogFile.trim)
        except LogError as error:  # another process writes; it trims as well
            log.info("embedded log not trimmed at open: %s", error)

    async def close(self) -> None:
        """End the subscriptions, give up the claim, close the file."""
        while self._subscriptions:
            await self._subscriptions.pop().close()
        if self._looking:
            self._looking.cancel()
            await asyncio.wait([self._looking])
            self._looking = None
        self._claim.give_up()
        await self._writer.close()
        await self._reader.close()

    async def declare(self, spec: StreamSpec) -> None:
        """Create the stream if it is missing. Its retention becomes that of `spec`, from the next publish on."""
        await self._writer.run(lambda file: file.declare(spec))

    async def partitions(self, stream: str) -> list[Partition]:
        """The partitions in order."""
        return await self._reader.run(lambda file: file.partitions(stream))

    async def bounds(self, partition: Partition) -> Bounds:
        """Exact bounds, at the time of asking."""
        return await self._reader.run(lambda file: file.bounds(partition))

    async def written_at(self, partition: Partition, offset: int) -> int | None:
        """When the first record at or after `offset` was written, in ms since 1970; None if there is none."""
        return await self._reader.run(lambda file: file.written_at(partition, offset))

    def read(self, partition: Partition, first: int, end: int) -> AsyncIterator[list[Record]]:
        """The records of a range; also beside a process that has claimed the file."""
        return read_pages(self._read_page, partition, first, end)

    async def subscribe(self, partition: Partition, group: str, owner: Owner) -> PagedSubscription:
        """Join the group. Members are active in the order in which they joined, each until it closes.

        The first subscription claims the file for this process: LogInUse when another one has it. As no other process
        reads, `owner.deactivate` is never called.
        """
        await self._reader.run(lambda file: file.bounds(partition))
        self._claim.take()
        subscription = PagedSubscription(partition, owner, self._turns[group, partition.name], self._read_page)
        self._subscriptions = [*(other for other in self._subscriptions if other.is_open), subscription]
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_for_other_processes(), name="look into the embedded log")
        return subscription

    async def publisher(self, partition: Partition, name: str | None = None) -> Publisher:
        """A publisher; each call returns after its last transaction is on the disk."""
        await self._reader.run(lambda file: file.bounds(partition))
        return _EmbeddedPublisher(self, partition, name)

    async def append(
        self, partition: Partition, name: str | None, messages: Sequence[bytes], ids: Sequence[int] | None
    ) -> None:
        """Store one transaction of a publisher and wake the readers in this process."""
        await self._writer.run(lambda file: file.append(partition, name, messages, ids))
        self._wake_readers()

    @property
    def is_open(self) -> bool:
        """Between `open` and `close`."""
        return self._writer.is_open

    async def _read_page(self, partition: Partition, position: int) -> list[Record]:
        waits = _waits()
        while True:
            try:
                return await self._reader.run(lambda file: file.page(partition, position))
            except LogError as error:
                wait = next(waits)
                log.warning("embedded log not read, next try in %s s: %s", wait, error)
                await asyncio.sleep(wait)

    async def _look_for_other_processes(self) -> None:
        seen = None
        while True:
            try:
                version = await self._reader.run(LogFile.version)
            except LogError as error:
                log.warning("embedded log not looked into: %s", error)
            else:
                if version != seen:
                    self._wake_readers()
                seen = version
            await asyncio.sleep(LOOK_SECONDS)

    def _wake_readers(self) -> None:
        for subscription in self._subscriptions:
            subscription.look_again()


class _EmbeddedPublisher:
    """Writing to one partition. A named one tries again for as long as the log is open: its ids make that harmless."""

    def __init__(self, log: EmbeddedLog, partition: Partition, name: str | None) -> None:
        self._log = log
        self._partition = partition
        self._name = name
        self._turn = asyncio.Lock()

    async def publish(self, messages: Sequence[bytes], ids: Sequence[int] | None = None) -> None:
        check_call(messages, ids, named=self._name is not None)
        store = self._store_once if self._name is None else self._store_surely
        async with self._turn:
            for part in _parts(messages):
                await store(messages[part], ids[part] if ids is not None else None)

    async def close(self) -> None:
        """Nothing to let go of: the connection is the log's."""

    async def _store_once(self, messages: Sequence[bytes], ids: Sequence[int] | None) -> None:
        try:
            await self._log.append(self._partition, None, messages, ids)
        except LogError as error:
            raise Unconfirmed(str(error)) from error

    async def _store_surely(self, messages: Sequence[bytes], ids: Sequence[int] | None) -> None:
        waits = _waits()
        while True:
            try:
                return await self._log.append(self._partition, self._name, messages, ids)
            except LogError as error:
                if not self._log.is_open:
                    raise
                wait = next(waits)
                log.warning("not published to %s, next try in %s s: %s", self._partition.name, wait, error)
                await asyncio.sleep(wait)


class _Thread:
    """A thread with its own connection to the file, so that the event loop never waits for a disk."""

    def __init__(self, path: Path, wall: Callable[[], float]) -> None:
        self._path = path
        self._wall = wall
        self._executor: ThreadPoolExecutor | None = None
        self._file: LogFile | None = None
        self.works = True

    @property
    def is_open(self) -> bool:
        return self._file is not None

    async def open(self) -> None:
        if self._file is None:
            self._executor = self._executor or ThreadPoolExecutor(1, thread_name_prefix="embedded-log")
            loop = asyncio.get_running_loop()
            self._file = await loop.run_in_executor(self._executor, LogFile, self._path, self._wall)

    async def run(self, call: Callable[[LogFile], T]) -> T:
        if self._file is None or self._executor is None:
            raise LogError(f"The log {self._path} is not open.")
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._executor, call, self._file)
        except LogError:
            self.works = False
            raise
        self.works = True
        return result

    async def close(self) -> None:
        if self._executor is None:
            return
        executor, self._executor, file, self._file = self._executor, None, self._file, None
        if file is not None:
            closing = asyncio.get_running_loop().run_in_executor(executor, file.close)
            await asyncio.wait([closing], timeout=CLOSE_SECONDS)
        executor.shutdown(wait=False)


def _parts(messages: Sequence[bytes]) -> Iterator[slice]:
    """Where to cut a call into transactions."""
    start = size = 0
    for index, message in enumerate(messages):
        if index > start and (index - start == TRANSACTION_MESSAGES or size + len(message) > TRANSACTION_BYTES):
            yield slice(start, index)
            start, size = index, 0
        size += len(message)
    if start < len(messages):
        yield slice(start, len(messages))


def _waits() -> Iterator[float]:
    yield from RETRY_SECONDS
    while True:
        yield RETRY_SECONDS[-1]
