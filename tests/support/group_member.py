"""A process that reads a partition as one of a group and writes what it has done to a ledger file.

    python -m tests.support.group_member URL PARTITION GROUP LEDGER NAME

The ledger stands for the database: a line "NAME OFFSET BODY" per record, written in one go when the record is done; the
position is behind its last line. Says "active" on standard output whenever it becomes the reader.
"""

import asyncio
import sys
from pathlib import Path

from streams.log import Partition
from streams.rabbitmq import RabbitLog


class Member:
    """Reads while active, one record at a time."""

    def __init__(self, ledger: Path, name: str) -> None:
        self._ledger = ledger
        self._name = name
        self._hands = asyncio.Lock()
        self._active = False

    async def activate(self, partition: Partition) -> int:
        """Begin behind the last line of the ledger."""
        async with self._hands:
            self._active = True
            sys.stdout.write("active\n")
            sys.stdout.flush()
            lines = self._ledger.read_text().splitlines()
            return int(lines[-1].split()[1]) + 1 if lines else 0

    async def deactivate(self, partition: Partition) -> None:
        """Finish the record in hand."""
        async with self._hands:
            self._active = False

    async def read(self, log: RabbitLog, partition: Partition, group: str) -> None:
        """For ever."""
        subscription = await log.subscribe(partition, group, self)
        with self._ledger.open("a", buffering=1) as ledger:
            while True:
                await subscription.ready()
                async with self._hands:
                    for record in subscription.take(1) if self._active else []:
                        await asyncio.sleep(0.002)  # the work
                        ledger.write(f"{self._name} {record.offset} {record.data.decode()}\n")
                await asyncio.sleep(0)


async def main(url: str, partition: str, group: str, ledger: str, name: str) -> None:
    """Join the group and read."""
    log = RabbitLog(url, heartbeat=2)
    await log.open()
    await Member(Path(ledger), name).read(log, Partition(partition, 0, partition), group)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
