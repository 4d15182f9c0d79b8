"""One process of the split's measurement: the engine's splitter and rstream's raw sending, turn by turn.

    python -m bench.split_child DATABASE_URL NAME ROUNDS

The last line of stdout is JSON. The clock of the split runs from the moment at which the first slice was taken from the
subscription until the last confirm of the last slice; beside it, until the commit that counts it. That of the raw
sending runs from the first call of `send_batch` to the last confirm of the very same messages.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from rstream import Producer, RawMessage
from sqlalchemy.ext.asyncio import AsyncEngine

from bench.places import HOST, LOG_URL
from bench.split import ITEMS, PARTITIONS, import_body, publish_import
from models.slices import slice_import
from processors.splitter.processor import Splitter
from processors.splitter.split import split
from scripts.devservices import places
from streams.database import connect
from streams.log import Log, StreamSpec
from streams.logs import open_log
from streams.message import Message
from streams.process import run_process
from streams.processor import Limits
from streams.telemetry import Metrics, configure_logging
from streams.transforms import TransformRuntime

BATCH = 500
"""Messages in one call of `send_batch`: rstream does not cut a batch at the broker's frame limit."""


Numbered = tuple[int, bytes]
"""A publishing id and a message."""


class Clock:
    """Notes when the engine reached which step for the first and for the last time."""

    def __init__(self) -> None:
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.recorded = asyncio.Event()

    def reset(self) -> None:
        self.first, self.last = {}, {}

    def step(self, name: str) -> None:
        self.last[name] = time.perf_counter()
        self.first.setdefault(name, self.last[name])
        if name == "recorded":
            self.recorded.set()


class Rig:
    """The running splitter and what measures it."""

    def __init__(self, log: Log, engine: AsyncEngine, name: str) -> None:
        self.log, self.engine, self.name = log, engine, name
        self.clock = Clock()
        self.offset = 0

    async def split(self, first: int, items: int) -> tuple[float, float]:
        """Split a new batch; seconds until the last confirm, and until the last commit."""
        body = import_body(first, items)
        self.offset += len(list(slice_import(body)))  # not later: from the first slice on this process is measured
        self.clock.reset()
        await publish_import(self.log, f"{self.name}-imports", body)
        await self._until_recorded()
        begun = self.clock.first["taken"]
        return self.clock.last["published"] - begun, self.clock.last["recorded"] - begun

    async def _until_recorded(self) -> None:
        query = "SELECT next_offset FROM processor_offsets WHERE processor = 'splitter'"
        while True:
            await asyncio.wait_for(self.clock.recorded.wait(), 30)
            self.clock.recorded.clear()
            await asyncio.sleep(0.3)  # a question in the midst of the split would be a part of it
            async with self.engine.connect() as connection:
                if (await connection.exec_driver_sql(query)).scalar_one() >= self.offset:
                    return


async def send_raw(producers: Sequence[Producer], streams: Sequence[str], parts: Sequence[Sequence[Numbered]]) -> float:
    """Seconds from the first call to the last confirm."""
    wanted, got, done = sum(map(len, parts)), 0, asyncio.Event()

    async def confirmed(_: Any) -> None:
        nonlocal got
        got += 1
        if got == wanted:
            done.set()

    async def send(producer: Producer, stream: str, part: Sequence[Numbered]) -> None:
        for at in range(0, len(part), BATCH):
            messages = [RawMessage(data, number) for number, data in part[at : at + BATCH]]
            await producer.send_batch(stream, messages, publisher_name="bench", on_publish_confirm=confirmed)

    begun = time.perf_counter()
    await asyncio.gather(*map(send, producers, streams, parts))
    await asyncio.wait_for(done.wait(), 60)
    return time.perf_counter() - begun


def ready_messages(first: int, offset: int) -> list[list[Numbered]]:
    """What the splitter makes of such a batch, whose first slice is at `offset`."""
    parts: list[list[Numbered]] = [[] for _ in range(PARTITIONS)]
    for number, one in enumerate(slice_import(import_body(first, ITEMS))):
        whole = split(Message("", "import", 1, 1, one.body, one.headers()), offset + number, PARTITIONS)
        for part, outgoing in zip(parts, whole.outgoing, strict=True):
            part.extend(outgoing)
    return parts


async def rounds(rig: Rig, number: int) -> dict[str, list[float]]:
    """Split and send, turn by turn; messages per second of each round."""
    await rig.log.declare(StreamSpec(f"{rig.name}-raw", PARTITIONS))
    streams = [partition.name for partition in await rig.log.partitions(f"{rig.name}-raw")]
    login = {"username": places.USER, "password": places.PASSWORD}
    producers = [Producer(HOST, places.STREAM_PORT, **login) for _ in streams]  # type: ignore[arg-type]
    for producer in producers:
        await producer.start()
    found: dict[str, list[float]] = {"split": [], "split_committed": [], "raw": []}
    for n in range(-1, number):  # the first round opens connections and is not counted
        published, committed = await rig.split(n * ITEMS + 1_000_000, ITEMS)
        raw = await send_raw(producers, streams, ready_messages(n * ITEMS + 1_000_000, rig.offset))
        if n >= 0:
            for name, seconds in (("split", published), ("split_committed", committed), ("raw", raw)):
                found[name].append(round(ITEMS / seconds))
    return found


async def main(stop: asyncio.Event) -> None:
    """Run the splitter and measure it."""
    url, name, number = sys.argv[1:]
    engine, log = connect(url, "bench split"), open_log(LOG_URL, label="bench split")
    await log.open()
    rig = Rig(log, engine, name)
    await log.declare(StreamSpec(f"{name}-imports"))
    await log.declare(StreamSpec(f"{name}-recipients", PARTITIONS))
    transform = Splitter(f"{name}-imports", f"{name}-recipients")
    runtime = TransformRuntime(transform, log, engine, Limits(), Metrics(), rig.clock.step)
    running = asyncio.create_task(runtime.run(stop))
    print(json.dumps(await rounds(rig, int(number))), flush=True)
    stop.set()
    await running
    await log.close()
    await engine.dispose()
    os._exit(0)  # the raw producers take their time to close


if __name__ == "__main__":
    configure_logging("WARNING")
    sys.exit(run_process(main))
