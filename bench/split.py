"""The split of 10,000 registrations into three partitions, beside rstream's own `send_batch` of the same messages.

The engine, the splitter and the publishers run as in the service (`split_child.py`), in one process with the raw
sending, which takes turns with them. Beside that, the service itself: from the first slice published to the batch
counted.
"""

import asyncio
import json
import sys
import time
from itertools import count
from typing import Any

from bench import database, feeds, workers
from bench.database import Database
from bench.invented import registration
from bench.places import LOG_URL, ROOT, WORK, say
from models.slices import slice_import
from streams.log import Log, StreamSpec
from streams.logs import open_log
from streams.message import Message

ITEMS = 10_000
PARTITIONS = 3
_numbers = count(2001)


def import_body(first: int, items: int) -> bytes:
    """An import list as its publisher sends it."""
    return json.dumps([registration(n) for n in range(first, first + items)], ensure_ascii=False).encode()


async def publish_import(log: Log, stream: str, body: bytes) -> str:
    """Write an import in slices, as `afluente publish` does; returns its batch id."""
    [partition] = await log.partitions(stream)
    publisher = await log.publisher(partition)
    slices = list(slice_import(body))
    await publisher.publish(
        [Message(f"{s.batch}/{s.first}", "import", 1, 1, s.body, s.headers()).encode() for s in slices]
    )
    await publisher.close()
    return slices[0].batch


async def run(rounds: int) -> dict[str, Any]:
    """Both measurements."""
    found = await _engine(rounds)
    found["service_seconds"] = await _service(rounds)
    return found


async def _engine(rounds: int) -> dict[str, Any]:
    async with database.fresh(next(_numbers)) as db:
        command = [sys.executable, "-m", "bench.split_child", db.url, db.name, str(rounds)]
        with (WORK / "split.log").open("ab") as errors:
            child = await asyncio.create_subprocess_exec(
                *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=errors
            )
        try:
            out, _ = await asyncio.wait_for(child.communicate(), 180)
        finally:
            if child.returncode is None:
                child.kill()
        await _delete_streams(db)
        if not out.strip():
            raise SystemExit(f"bench: the split failed; see {WORK / 'split.log'}")
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        say(f"bench: split {found['split']}, raw {found['raw']} messages/s")
        return found


async def _service(rounds: int) -> list[float]:
    """The splitter as its own process."""
    async with database.fresh(next(_numbers)) as db:
        log = open_log(LOG_URL, label="bench split")
        await log.open()
        settings = {
            "DATABASE_URL": db.url,
            "IMPORTS_STREAM": f"{db.name}-imports",
            "RECIPIENTS_STREAM": f"{db.name}-recipients",
            "RECIPIENTS_PARTITIONS": str(PARTITIONS),
        }
        await log.declare(StreamSpec(settings["IMPORTS_STREAM"]))
        await log.declare(StreamSpec(settings["RECIPIENTS_STREAM"], PARTITIONS))
        splitter = workers.Product("splitter", settings)
        try:
            await asyncio.to_thread(workers.wait_until_ready, [splitter])
            await _batch(db, log, settings["IMPORTS_STREAM"], 9_000_000, 100)
            return [await _batch(db, log, settings["IMPORTS_STREAM"], n * ITEMS, ITEMS) for n in range(rounds)]
        finally:
            await asyncio.to_thread(splitter.stop)
            await log.close()
            await _delete_streams(db)


async def _batch(db: Database, log: Log, stream: str, first: int, items: int) -> float:
    """Seconds from before the first slice is published to the commit that counts the last."""
    body = import_body(first, items)
    begun = time.time()
    batch = await publish_import(log, stream, body)
    query = "SELECT extract(epoch FROM updated_at)::float8 FROM import_batches WHERE batch_id = $1 AND received = $2"
    for _ in range(3000):
        ended = await db.look.fetchval(query, batch, items)
        if ended is not None:
            return float(ended) - begun
        await asyncio.sleep(0.01)
    raise SystemExit("bench: the splitter did not split")


async def _delete_streams(db: Database) -> None:
    await feeds.delete(f"{db.name}-imports", 0)
    for name in ("recipients", "raw"):
        await feeds.delete(f"{db.name}-{name}", PARTITIONS)
