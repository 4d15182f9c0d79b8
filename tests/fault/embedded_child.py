"""A process beside the test, to be killed by it: `publish`, `publish-unnamed` or `read` on the embedded log of a file.

It prints one line, at once, for what is certain: `confirmed N` after a confirm, `reading`, `record TEXT`.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from itertools import count
from pathlib import Path

from streams.embedded import EmbeddedLog
from streams.log import Partition, StreamSpec
from streams.testing import NotingOwner

CALL = 20
"""Messages of one call of `publish`."""


def say(line: str) -> None:
    """To the test, before anything else happens."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def publish(log: EmbeddedLog, partition: Partition) -> None:
    """Messages 0, 1, 2, ... with their numbers as ids, as a splitter does that begins again at its first record."""
    publisher = await log.publisher(partition, "splitter")
    for first in count(0, CALL):
        numbers = range(first, first + CALL)
        await publisher.publish([b"%d" % number for number in numbers], numbers)
        say(f"confirmed {numbers[-1]}")


async def publish_unnamed(log: EmbeddedLog, partition: Partition) -> None:
    """Messages from the end of the log on, without ids."""
    publisher = await log.publisher(partition)
    for first in count((await log.bounds(partition)).next, CALL):
        await publisher.publish([b"%d" % number for number in range(first, first + CALL)])
        say(f"confirmed {first + CALL - 1}")


async def read(log: EmbeddedLog, partition: Partition) -> None:
    """Read as a processor and tell what comes."""
    subscription = await log.subscribe(partition, "processors", NotingOwner())
    say("reading")
    while True:
        await subscription.ready()
        for record in subscription.take(100):
            say(f"record {record.data.decode()}")


COMMANDS: dict[str, Callable[[EmbeddedLog, Partition], Coroutine[None, None, None]]] = {
    "publish": publish,
    "publish-unnamed": publish_unnamed,
    "read": read,
}


async def main(command: str, path: Path) -> None:
    """Open the log, make the stream, do it."""
    log = EmbeddedLog(path)
    await log.open()
    await log.declare(StreamSpec("imports"))
    await COMMANDS[command](log, (await log.partitions("imports"))[0])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
