"""A subscription on a log that this process reads by itself, page by page: that of `embedded.py` and of `testing.py`.

It waits for its turn in its group, asks its owner where to begin, and reads a little ahead of whoever takes.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from streams.errors import LogError
from streams.log import Owner, Partition, Record

PAGE_RECORDS = 1_000
PAGE_BYTES = 4 * 1024**2
"""A page ends with the record that reaches either. A subscription holds less than one page before it reads the next."""

CLOSE_SECONDS = 5.0
"""So long may an owner that is being asked take to give in when the subscription is closed."""

ReadPage = Callable[[Partition, int], Awaitable[list[Record]]]
"""The page of a partition that begins at an offset; empty when there is nothing yet."""


async def read_pages(read_page: ReadPage, partition: Partition, first: int, end: int) -> AsyncIterator[list[Record]]:
    """See `log.Log.read`."""
    while first < end and (page := await read_page(partition, first)):
        yield [record for record in page if record.offset < end]
        first = page[-1].offset + 1


class PagedSubscription:
    """One member of a group; active while it holds `turn`, which all members of the group share."""

    def __init__(self, partition: Partition, owner: Owner, turn: asyncio.Lock, read_page: ReadPage) -> None:
        self.partition = partition
        self._owner = owner
        self._turn = turn
        self._read_page = read_page
        self._held: deque[Record] = deque()
        self._held_bytes = 0
        self._arrived = asyncio.Event()
        self._look_again = asyncio.Event()
        self._stale = False
        self._closed = False
        self._reading = asyncio.create_task(self._read(), name=f"read {partition.name}")
        self._reading.add_done_callback(
            lambda _: self._arrived.set()
        )  # whoever waits in ready() must hear of a failure

    async def ready(self) -> None:
        """Return as soon as a record can be taken; LogError when none will ever come again."""
        while not self._held:
            self._raise_if_over()
            self._arrived.clear()
            await self._arrived.wait()

    def take(self, limit: int) -> list[Record]:
        """Up to `limit` records in rising order."""
        records = [self._held.popleft() for _ in range(min(limit, len(self._held)))]
        self._held_bytes -= sum(len(record.data) for record in records)
        if self._has_room():
            self._look_again.set()
        return records

    async def restart(self) -> None:
        """Drop what is held; the owner is asked anew in the background, for it may be its own task that calls this."""
        self._stale = True
        self._drop()
        self.look_again()

    def look_again(self) -> None:
        """Something may have been published."""
        self._look_again.set()

    async def close(self) -> None:
        """Stop reading and let the next member of the group begin."""
        self._closed = self._stale = True
        self._reading.cancel()
        await asyncio.wait([self._reading], timeout=CLOSE_SECONDS)
        self._drop()

    @property
    def is_open(self) -> bool:
        """False after `close`."""
        return not self._closed

    async def _read(self) -> None:
        async with self._turn:
            while not self._closed:
                self._stale = False
                position = await self._owner.activate(self.partition)
                await self._read_on(position)

    async def _read_on(self, position: int) -> None:
        while not self._stale:
            self._look_again.clear()  # before reading: what is published while we read wakes us again
            page = await self._read_page(self.partition, position) if self._has_room() else []
            if self._stale:
                return
            if page:
                position = page[-1].offset + 1
                self._hold(page)
            else:
                await self._look_again.wait()

    def _has_room(self) -> bool:
        return len(self._held) < PAGE_RECORDS and self._held_bytes < PAGE_BYTES

    def _hold(self, page: list[Record]) -> None:
        self._held += page
        self._held_bytes += sum(len(record.data) for record in page)
        self._arrived.set()

    def _drop(self) -> None:
        self._held.clear()
        self._held_bytes = 0

    def _raise_if_over(self) -> None:
        if not self._reading.done():
            return
        failure = None if self._reading.cancelled() else self._reading.exception()
        raise failure or LogError(f"The subscription to {self.partition.name} is closed.")
