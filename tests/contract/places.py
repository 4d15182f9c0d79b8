"""Where the logs of the contract suite live, and what may be asked of each place; nothing here asserts."""

import asyncio
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from base64 import b64encode
from pathlib import Path
from urllib.parse import quote
from uuid import uuid4

from streams.log import Log, Partition, StreamSpec
from streams.logs import open_log
from streams.testing import MemoryLog
from tests.conftest import Services

MOST_PARTITIONS = 3
"""The largest super stream that the suite declares."""


class Place(ABC):
    """One store that several instances of a log may open."""

    read_ahead: int
    """So many records at most may a subscription hold that nobody takes from."""

    def __init__(self) -> None:
        self._logs: list[Log] = []
        self._names: list[str] = []

    @abstractmethod
    def _new_log(self) -> Log: ...

    async def connect(self) -> Log:
        """An opened log of its own on this store, as another process would have it; closed at the end of the test."""
        log = self._new_log()
        await log.open()
        self._logs.append(log)
        return log

    async def second_member(self, first: Log) -> Log:
        """The log through which a second member joins a group in which `first` already reads."""
        return first

    def new_name(self) -> str:
        """A stream name that no other test or run has; what is declared under it is gone at the end of the test."""
        self._names.append(f"contract-{uuid4().hex[:12]}")
        return self._names[-1]

    async def new_stream(self, log: Log, partitions: int = 0) -> list[Partition]:
        """The partitions of a stream that nobody has written to."""
        name = self.new_name()
        await log.declare(StreamSpec(name, partitions))
        return await log.partitions(name)

    async def clear(self) -> None:
        """Close every log and leave nothing behind."""
        for log in self._logs:
            await log.close()


class MemoryPlace(Place):
    """One `MemoryLog`. It has no second instance, so everyone gets the same."""

    read_ahead = 2_000

    def __init__(self) -> None:
        super().__init__()
        self._log = MemoryLog()

    def _new_log(self) -> Log:
        return self._log


class EmbeddedPlace(Place):
    """A file. Only one instance may subscribe, so both members of a group read through that one."""

    read_ahead = 2_000

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._url = f"embedded:///{folder / 'log.db'}"

    def _new_log(self) -> Log:
        return open_log(self._url)


class RabbitPlace(Place):
    """The development broker. Its streams are deleted through its management interface."""

    read_ahead = 12_000

    def __init__(self, broker: Services) -> None:
        super().__init__()
        self._broker = broker

    def _new_log(self) -> Log:
        return open_log(self._broker.log_url)

    async def second_member(self, first: Log) -> Log:
        """Another set of connections, as another process would have."""
        return await self.connect()

    async def clear(self) -> None:
        """Close every log and delete the streams of this test."""
        await super().clear()
        for name in self._names:
            await asyncio.to_thread(self._delete_stream, name)

    def _delete_stream(self, stream: str) -> None:
        for name in (stream, *(f"{stream}-{index}" for index in range(MOST_PARTITIONS))):
            self._delete(f"queues/%2F/{quote(name, safe='')}")
        self._delete(f"exchanges/%2F/{quote(stream, safe='')}")

    def _delete(self, what: str) -> None:
        broker = self._broker
        request = urllib.request.Request(f"http://{broker.host}:{broker.management_port}/api/{what}", method="DELETE")
        credentials = b64encode(f"{broker.user}:{broker.password}".encode()).decode()
        request.add_header("Authorization", f"Basic {credentials}")
        try:
            urllib.request.urlopen(request, timeout=10).close()
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
