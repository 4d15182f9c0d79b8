"""What the processes read: invented registrations as messages of a stream for the product, of a queue for the peer."""

import asyncio
import json
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import quote

from bench.invented import registration
from bench.places import AMQP_URL, HOST, LOG_URL, ROOT, WORK
from models.registration import parse_registration, recipient_body
from scripts.devservices import places
from streams.log import Log, Partition, Publisher, StreamSpec, route
from streams.logs import open_log
from streams.message import Message

BATCH = "b" * 64
PEER_BATCH = 500
"""Registrations in one message of the peer's queue: what the import job sends."""


def recipients(numbers: range, partitions: int) -> list[list[bytes]]:
    """The messages of these registrations as the splitter writes them, by partition."""
    parts: list[list[bytes]] = [[] for _ in range(partitions)]
    for n in numbers:
        parsed = parse_registration(registration(n))
        key = parsed.key
        data = Message(key, "recipient", 1, 1, recipient_body(parsed, BATCH, n)).encode()
        parts[route(key, partitions)].append(data)
    return parts


class Stream:
    """A super stream of recipients, with a publisher for each partition kept open."""

    def __init__(self, log: Log, name: str, partitions: list[Partition], publishers: list[Publisher]) -> None:
        self.log, self.name, self.partitions, self._publishers = log, name, partitions, publishers

    async def publish(self, parts: list[list[bytes]]) -> None:
        """Append what is ready; returns when all of it is confirmed."""
        await asyncio.gather(*(p.publish(part) for p, part in zip(self._publishers, parts, strict=True) if part))


@asynccontextmanager
async def stream(name: str, partitions: int) -> AsyncIterator[Stream]:
    """Such a stream for the time of the block."""
    log = open_log(LOG_URL, label=f"bench {name}")
    await log.open()
    try:
        await log.declare(StreamSpec(name, partitions))
        known = await log.partitions(name)
        yield Stream(log, name, known, [await log.publisher(partition) for partition in known])
    finally:
        await log.close()
        await delete(name, partitions)


class Queue:
    """The peer's queue. A process in its environment publishes to it, with confirms."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self._process = name, process

    async def publish(self, numbers: range) -> None:
        """Publish registrations in messages of `PEER_BATCH`; returns when all are confirmed."""
        await self._say([numbers.start, numbers.stop, PEER_BATCH])

    async def _say(self, line: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        answer = await asyncio.wait_for(self._process.stdout.readline(), 60)
        assert answer == b"done\n", answer


@asynccontextmanager
async def queue(name: str, programs: str) -> AsyncIterator[Queue]:
    """Such a queue for the time of the block; `programs`: the folder of the peers' environment."""
    command = [f"{programs}/python", "-m", "bench.peers.publish", AMQP_URL, name]
    with (WORK / "publisher.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, cwd=ROOT
        )
    made = Queue(name, process)
    try:
        await made.publish(range(0))  # returns when it is connected and the queue is declared
        yield made
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
        await asyncio.to_thread(_delete, "queues", name)


async def delete(stream_name: str, partitions: int) -> None:
    """Delete a stream (0 partitions) or a super stream, whether it is there or not."""
    names = [f"{stream_name}-{index}" for index in range(partitions)] or [stream_name]
    for name in names:
        await asyncio.to_thread(_delete, "queues", name)
    if partitions:
        await asyncio.to_thread(_delete, "exchanges", stream_name)


def _delete(kind: str, name: str) -> None:
    url = f"http://{HOST}:{places.MANAGEMENT_PORT}/api/{kind}/%2F/{quote(name, safe='')}"
    login = b64encode(f"{places.USER}:{places.PASSWORD}".encode()).decode()
    request = urllib.request.Request(url, method="DELETE", headers={"Authorization": f"Basic {login}"})
    try:
        urllib.request.urlopen(request, timeout=10).close()
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
