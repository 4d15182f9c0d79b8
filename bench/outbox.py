"""The outbox beside its peers: how fast a backlog drains, how prompt an event is, and memory on a large backlog.

    python -m bench.outbox [--quick] [--rounds N]          also `make bench-outbox`
    python -m bench.outbox --write-docs                    put the newest run into docs/performance.md

Drain: 5,000 events committed in one transaction while the worker idles; events per second up to the last POST. Latency:
100 commits a second for 10 s, from the return of COMMIT to the POST at the receiver. The programs take turns, round by
round, on databases of their own. The last line is JSON.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg

from bench import database, docs, feeds, install, machine, outbox_report, workers
from bench.http_sink import TOKEN
from bench.outbox_report import JOBS, PEERS, POLLER, PRODUCT
from bench.places import HOST, LOG_URL, RESULTS, ROOT, WORK, free_port, say
from streams.log import StreamSpec
from streams.logs import open_log

EVENT = "new_checkout.repayment_sync"
PAYLOAD = json.dumps({"repayment": {"reference": "r"}, "data": "x" * 440})
INSERT = f"""
INSERT INTO outbox_events (event_name, payload) SELECT '{EVENT}', $1::jsonb FROM generate_series(1, $2) RETURNING id"""
DEFER = """
SELECT procrastinate_defer_jobs_v1(array_agg(ROW('outbox', 'deliver', 0, NULL, NULL, jsonb_build_object('event_id', id),
    NULL)::procrastinate_job_to_defer_v1)) FROM unnest($1::bigint[]) AS id"""
_numbers = count(4001)


@dataclass(frozen=True, slots=True)
class Run:
    """One program, once."""

    drain_per_s: float
    cpu: float
    p50_ms: float
    p99_ms: float
    missing: int
    repeated: int


class Receiver:
    """The POSTs as they are noted."""

    def __init__(self, port: int, file: Path) -> None:
        self.port, self._file = port, file

    @property
    def url(self) -> str:
        """Its base."""
        return f"http://{HOST}:{self.port}"

    def posts(self) -> dict[int, list[float]]:
        """When each event came."""
        found: dict[int, list[float]] = {}
        for line in self._file.read_text().splitlines():
            event, at = line.split()
            found.setdefault(int(event), []).append(float(at))
        return found

    async def has(self, events: Sequence[int], seconds: float) -> dict[int, list[float]]:
        """Wait until all of these have come."""
        end = time.monotonic() + seconds
        while not self.posts().keys() >= set(events):
            if time.monotonic() > end:
                missing = len(set(events) - self.posts().keys())
                raise TimeoutError(f"{missing} of {len(events)} events have not come")
            await asyncio.sleep(0.2)
        return self.posts()


@asynccontextmanager
async def receiver(name: str) -> AsyncIterator[Receiver]:
    """A sink of its own for each run."""
    port, file = free_port(), WORK / f"posts-{name}.txt"
    file.unlink(missing_ok=True)
    file.touch()
    command = [sys.executable, "-m", "bench.http_sink", str(port), str(file)]
    worker = workers.Worker("http-sink", command, {}, folder=ROOT)
    try:
        await asyncio.sleep(0.5)
        yield Receiver(port, file)
    finally:
        worker.kill()
        file.unlink(missing_ok=True)


@asynccontextmanager
async def program(name: str, db: database.Database, to: Receiver) -> AsyncIterator[list[workers.Worker]]:
    """The processes of one program, ready."""
    started = await asyncio.to_thread(_start, name, db, to)
    try:
        await asyncio.sleep(2.0)
        yield started
    finally:
        for worker in started:
            await asyncio.to_thread(worker.stop)
        if name == PRODUCT:
            streams = {"outbox": 3, "recipients": 1, "requests": 0, "dead": 0}
            for stream, partitions in ((f"{db.name}-{name}", count) for name, count in streams.items()):
                await feeds.delete(stream, partitions)


def _start(name: str, db: database.Database, to: Receiver) -> list[workers.Worker]:
    if name != PRODUCT:
        environment = {"BENCH_DSN": db.dsn, "BENCH_URL": f"{to.url}/v1/sync/repayments", "BENCH_TOKEN": TOKEN}
        module = "bench.peers.outbox_poller" if name == POLLER else "bench.peers.outbox_procrastinate"
        python = str(install.peers() / "python")
        return [workers.Worker(module.rpartition(".")[2], [python, "-m", module], environment, folder=ROOT)]
    settings = product_settings(db, to)
    asyncio.run(_declare(settings))  # before both start: the broker stumbles over two that make the same super stream
    products = [workers.Product(processor, settings) for processor in ("outbox_relay", "sync")]
    workers.wait_until_ready(products)
    return list(products)


async def _declare(settings: dict[str, str]) -> None:
    log = open_log(LOG_URL, label="bench outbox")
    await log.open()
    await log.declare(StreamSpec(settings["OUTBOX_STREAM"], 3))
    await log.close()


def product_settings(db: database.Database, to: Receiver) -> dict[str, str]:
    """As in production, on streams of its own."""
    return {
        "DATABASE_URL": db.url,
        "OUTBOX_STREAM": f"{db.name}-outbox",
        "RECIPIENTS_STREAM": f"{db.name}-recipients",
        "RECIPIENTS_PARTITIONS": "1",
        "REPAYMENT_REQUESTS_STREAM": f"{db.name}-requests",
        "DEAD_LETTERS_STREAM": f"{db.name}-dead",
        "NEW_CHECKOUT_API_URL": to.url,
        "NEW_CHECKOUT_API_TOKEN": TOKEN,
        "LOG_LEVEL": "WARNING",
    }


async def write(connection: Any, name: str, events: int) -> dict[int, float]:
    """So many events in one transaction; when its COMMIT had returned."""
    async with connection.transaction():
        ids = [row["id"] for row in await connection.fetch(INSERT, PAYLOAD, events)]
        if name == JOBS:
            await connection.execute(DEFER, ids)
    return dict.fromkeys(ids, time.time())


async def measure(name: str, events: int, seconds: float) -> Run:
    """Drain, then latency."""
    async with database.fresh(next(_numbers)) as db, receiver(db.name) as to:
        if name == JOBS:
            await _procrastinate_schema(db)
        connection = await asyncpg.connect(db.dsn)
        try:
            async with program(name, db, to) as processes:
                await to.has(list(await write(connection, name, 200)), 30)
                await connection.execute("VACUUM ANALYZE outbox_events")
                await asyncio.sleep(1.5)
                cpu = _cpu(processes)
                drained = await write(connection, name, events)
                posts = await to.has(list(drained), 120)
                rate = events / (max(posts[event][0] for event in drained) - next(iter(drained.values())))
                await asyncio.sleep(1.5)
                cpu = (_cpu(processes) - cpu) / events * 1000
                prompt = await _commit_steadily(connection, name, seconds)
                posts = await to.has(list(prompt), 30)
        finally:
            await connection.close()
    waits = sorted((posts[event][0] - at) * 1000 for event, at in prompt.items())
    everything = Counter({event: len(times) for event, times in posts.items()})
    repeated = sum(times - 1 for times in everything.values())
    return Run(rate, cpu, waits[len(waits) // 2], waits[int(len(waits) * 0.99)], 0, repeated)


async def _commit_steadily(connection: Any, name: str, seconds: float) -> dict[int, float]:
    """100 commits a second, one event each."""
    commits: dict[int, float] = {}
    begun = time.perf_counter()
    for n in range(int(seconds * 100)):
        await asyncio.sleep(max(0.0, begun + n * 0.01 - time.perf_counter()))
        commits |= await write(connection, name, 1)
    return commits


async def _procrastinate_schema(db: database.Database) -> None:
    python = str(install.peers() / "python")
    command = [python, "-m", "procrastinate", "--app=bench.peers.outbox_procrastinate.app", "schema", "--apply"]
    environment = {"BENCH_DSN": db.dsn, "PYTHONPATH": str(ROOT)}
    process = workers.Worker("procrastinate-schema", command, environment, folder=ROOT)
    await asyncio.to_thread(process.wait)


def _cpu(processes: Sequence[workers.Worker]) -> float:
    return sum(machine.cpu_seconds(process.pid) for process in processes)


# ---- memory


async def backlog(events: int) -> dict[str, Any]:
    """So many pending events before anybody starts; memory of both processes while they drain."""
    async with database.fresh(next(_numbers)) as db, receiver(db.name) as to:
        await db.look.execute(INSERT, PAYLOAD, events)
        begun = time.monotonic()
        series: list[float] = []
        async with program(PRODUCT, db, to) as processes:
            while await db.look.fetchval("SELECT count(*) FROM outbox_events WHERE status = 'pending'"):
                series.append(max(machine.resident_mb(process.pid) for process in processes))
                if time.monotonic() - begun > 300:
                    raise TimeoutError("the backlog is not drained")
                await asyncio.sleep(0.5)
            peaks = [machine.peak_mb(process.pid) for process in processes]
            posts = to.posts()
    quarter = max(1, len(series) // 4)
    return {
        "events": events,
        "seconds": round(time.monotonic() - begun, 1),
        "early_mb": statistics.median(series[:quarter]),
        "late_mb": statistics.median(series[-quarter:]),
        "peak_mb": max(peaks),
        "posted": len(posts),
        "repeated": sum(len(times) - 1 for times in posts.values()),
    }


# ---- the whole


async def everything(rounds: int, quick: bool) -> dict[str, Any]:
    """All programs in turn, then the backlog."""
    runs: dict[str, list[Run]] = {name: [] for name in (PRODUCT, *PEERS)}
    about: dict[str, Any] = {
        "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": machine.commit(),
        "rounds": rounds,
    }
    on = machine.describe()
    about |= {"quick": quick, "machine": on, "load_before": machine.load()}
    begun = time.monotonic()
    async with database.template() as on["postgresql"]:
        for _ in range(rounds):
            for name, each in runs.items():
                run = await measure(name, 1000 if quick else 5000, 2 if quick else 10)
                each.append(run)
                say(f"bench: {name}: {run.drain_per_s:,.0f}/s, p50 {run.p50_ms:.1f} ms, p99 {run.p99_ms:.1f} ms")
        memory = await backlog(5000 if quick else 100_000)
    about |= {"seconds": round(time.monotonic() - begun), "load_after": machine.load()}
    return about | {"runs": {n: [asdict(run) for run in each] for n, each in runs.items()}, "memory": memory}


def main() -> None:
    """Read the arguments and do it."""
    parser = argparse.ArgumentParser(prog="python -m bench.outbox", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a look; its figures prove nothing")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--write-docs", action="store_true", help="put the newest run into docs/performance.md")
    arguments = parser.parse_args()
    if arguments.write_docs:
        docs.write_outbox()
        return
    WORK.mkdir(parents=True, exist_ok=True)
    install.services()
    install.peers()
    found = asyncio.run(everything(1 if arguments.quick else arguments.rounds, arguments.quick))
    RESULTS.mkdir(exist_ok=True)
    kind = "outbox-quick" if arguments.quick else "outbox"
    name = f"{kind}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.json"
    (RESULTS / name).write_text(json.dumps(found, indent=1))
    outbox_report.show(found)
    print(json.dumps(outbox_report.summary(found)))


if __name__ == "__main__":
    main()
