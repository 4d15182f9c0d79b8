"""From a filled stream to the mail server: the mailer beside FastStream, turn by turn.

The clock of a run starts before its first message is published and stops with the last row's `sent_at`. The process is
up and warm by then: its connections are open, the first mails sent, the tables analysed. Publishing is part of the
time for both: 10,000 small messages for the product, 20 large ones for the peer.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from bench import database, feeds, install, machine, workers
from bench.database import Database
from bench.places import say

LIMIT_SECONDS = 180.0
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Case:
    """One program in one situation. Each has its pendant: the same situation with the other program."""

    name: str
    product: bool
    processes: int = 1
    connections: int = 16
    delay_ms: float = 0.0
    same_mail: bool = False
    """The peer sends the product's mail instead of its small one."""


@dataclass(slots=True)
class Run:
    """What one run showed. CPU in seconds per 1,000 mails: of the processes measured, and of the whole machine."""

    rate: float
    cpu: float
    machine: float
    peak_mb: float
    details: dict[str, float] = field(default_factory=dict)


CASES = [
    Case("one process", True),
    Case("one process, FastStream", False),
    Case("one process, FastStream with our mail", False, same_mail=True),
    Case("two processes", True, processes=2),
    Case("two processes, FastStream", False, processes=2),
    Case("20 ms, 16 connections", True, delay_ms=20),
    Case("20 ms, 16 connections, FastStream", False, delay_ms=20),
    Case("20 ms, 64 connections", True, delay_ms=20, connections=64),
    Case("20 ms, 64 connections, FastStream", False, delay_ms=20, connections=64),
]


async def run(rounds: int, mails: int, slow_mails: int) -> dict[str, list[dict[str, Any]]]:
    """All cases in turn, `rounds` times. Returns the runs of each case by its name."""
    found: dict[str, list[dict[str, Any]]] = {case.name: [] for case in CASES}
    for number in range(1, rounds + 1):
        for case in CASES:
            one = await once(case, slow_mails if case.delay_ms or case.same_mail else mails)
            found[case.name].append(asdict(one))
            say(f"bench: round {number}, {case.name}: {one.rate:,.0f} mails/s, CPU {one.cpu:.3f} s per 1,000")
    return found


async def once(case: Case, mails: int) -> Run:
    """One run of one case."""
    sink = workers.slow_sink(case.delay_ms) if case.delay_ms else workers.quick_sink()
    async with database.fresh(next(_numbers)) as db:
        with sink as port:
            open_side = product(case, db, port) if case.product else peer(case, db, port)
            async with open_side as side:
                return await side.measure(mails)


class Side:
    """A program that is up and warm, and what feeds it."""

    def __init__(self, db: Database, processes: Sequence[workers.Worker], feed: Callable[[range], Any]) -> None:
        self.db, self.processes, self._feed = db, processes, feed

    async def measure(self, mails: int) -> Run:
        """Publish so many and wait for the last."""
        await self.db.settle()
        publish = self._feed(range(mails))
        cpu, busy, before = self._cpu(), machine.busy_seconds(), self._metrics()
        begun = time.time()
        await publish()
        await self.db.until_sent(mails, LIMIT_SECONDS)
        busy = machine.busy_seconds() - busy
        await asyncio.sleep(0.3)  # the acknowledgement of a message, a last commit
        cpu = self._cpu() - cpu
        await self.db.check_each_sent_once(mails)
        seconds = await self.db.last_sent_at() - begun
        peak = sum(machine.peak_mb(process.pid) for process in self.processes)
        return Run(mails / seconds, cpu * 1000 / mails, busy * 1000 / mails, peak, _details(before, self._metrics()))

    def _cpu(self) -> float:
        return sum(machine.cpu_seconds(process.pid) for process in self.processes)

    def _metrics(self) -> dict[str, float]:
        """The sum of the product's own metrics over its processes."""
        total: dict[str, float] = {}
        for process in self.processes:
            for name, value in process.metrics().items() if isinstance(process, workers.Product) else ():
                total[name] = total.get(name, 0.0) + value
        return total


def _details(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Means of the run from the product's histograms; nothing for the peer."""

    def mean(name: str) -> float:
        total, number = (
            after[key] - before.get(key, 0.0)
            for key in (f'{name}_{part}{{processor="mailer"}}' for part in ("sum", "count"))
        )
        return total / number

    if not after:
        return {}
    return {
        "mails_per_commit": mean("afluente_commit_group_size"),
        "commit_ms": mean("afluente_commit_seconds") * 1000,
        "act_ms": mean("afluente_act_seconds") * 1000,
    }


# ---- the two sides


@asynccontextmanager
async def product(case: Case, db: Database, smtp_port: int, **settings: str) -> AsyncIterator[Side]:
    """The mailer, as many processes as the case says, each reading a partition."""
    name = f"{db.name}-recipients"
    own = {
        "DATABASE_URL": db.url,
        "RECIPIENTS_STREAM": name,
        "RECIPIENTS_PARTITIONS": str(case.processes),
        "SMTP_PORT": str(smtp_port),
        "SLOTS": str(case.connections),
    }
    async with feeds.stream(name, case.processes) as stream:
        processes = [workers.Product("mailer", own | settings) for _ in range(case.processes)]
        try:
            await asyncio.to_thread(workers.wait_until_ready, processes)
            await _warm_product(case, db, stream, processes)

            def feed(numbers: range) -> Callable[[], Any]:
                parts = feeds.recipients(numbers, case.processes)
                return lambda: stream.publish(parts)

            yield Side(db, processes, feed)
        finally:
            await asyncio.to_thread(_stop, processes)


async def _warm_product(case: Case, db: Database, stream: feeds.Stream, processes: Sequence[workers.Product]) -> None:
    """Mails until every process has sent some: the broker may take a moment to give each of them a partition."""
    first, sent = 9_000_000, 0
    while sent < 10 * case.connections or not all(process.mails() for process in processes):
        some = 5 * case.connections * case.processes
        await stream.publish(feeds.recipients(range(first + sent, first + sent + some), case.processes))
        sent += some
        await db.until_sent(sent, 30)
        if sent > 10_000:
            raise SystemExit("bench: one process of the product reads no partition")
        await asyncio.sleep(0.2)


@asynccontextmanager
async def peer(case: Case, db: Database, smtp_port: int) -> AsyncIterator[Side]:
    """FastStream, with as many workers as the case says."""
    name = f"{db.name}-imports"
    async with feeds.queue(name, str(install.peers())) as queue:
        worker = workers.faststream(
            db.dsn, name, smtp_port, workers=case.processes, connections=case.connections, same_mail=case.same_mail
        )
        try:
            await _warm_peer(case, db, queue)
            yield Side(db, [worker], lambda numbers: lambda: queue.publish(numbers))
        finally:
            await asyncio.to_thread(_stop, [worker])


async def _warm_peer(case: Case, db: Database, queue: feeds.Queue) -> None:
    """Messages of at least ten mails per connection, for each worker at once."""
    first, sent = 9_000_000, 0
    for _ in range(3):
        some = feeds.PEER_BATCH * case.processes if case.connections > 16 else 160 * case.processes
        for _ in range(case.processes):
            await queue.publish(range(first + sent, first + sent + some // case.processes))
            sent += some // case.processes
        await db.until_sent(sent, 60)
        await asyncio.sleep(0.2)


def _stop(processes: Sequence[workers.Worker]) -> None:
    for process in processes:
        process.stop()
