"""The import job in the test's own process: splitter, mailers and relay as `_compose.py` builds them; ways to look.

What a test asks is what people ask: the rows, `status`, the dead letters, SQL, and what arrived at the mail server.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncEngine

from models.slices import batch_id
from processors import _compose, _publish, _status
from processors._demo.sink import Sink
from processors._house import House, open_house
from processors._serve import run_processors
from processors._settings import Settings, check_lease, check_orders
from streams.database import connect
from streams.log import Log, Record
from streams.logs import open_log
from streams.message import Message, decode
from streams.telemetry import Metrics
from streams.testing import NotingOwner, eventually
from tests.support.databases import from_now, query
from tests.support.sites import Site

PROCESSORS = ("splitter", "mailer", "outbox_relay")


def person(number: int, **changes: object) -> dict[str, object]:
    """A registration as the publisher writes it, of an invented person."""
    item = {
        "registration": 154_000_000 + number,
        "opp_id": 7301,
        "opp_name": "Edital de teste",
        "number": f"on-{number}",
        "agent_name": f"Pessoa {number}",
        "agent_email": address(number),
    }
    return item | changes


def people(count: int) -> list[dict[str, object]]:
    """The first so many."""
    return [person(number) for number in range(1, count + 1)]


def address(number: int) -> str:
    """Where `person(number)` gets mail."""
    return f"p{number}@example.com"


def bare(body: bytes) -> bytes:
    """A record as any AMQP client may write it: one data section and not a single property."""
    return b"\x00\x53\x75\xb0" + len(body).to_bytes(4, "big") + body


def seconds(at: datetime | str) -> float:
    """A stored time in seconds since 1970; without a zone it is UTC."""
    at = datetime.fromisoformat(at) if isinstance(at, str) else at
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


class Looks:
    """Looking at a site from outside, whoever runs there: an engine and a log of its own."""

    def __init__(self, site: Site, sink: Sink, **changes: object) -> None:
        self.site, self.sink = site, sink
        self.environment = site.environment(sink, **changes)
        values: dict[str, Any] = {name.lower(): value for name, value in self.environment.items()}
        self.settings = Settings(_env_file=None, **values)
        check_lease(self.settings)
        check_orders(self.settings)
        self._stack = AsyncExitStack()
        self.engine: AsyncEngine = connect(site.database_url, "test")
        self.log = open_log(site.log_url, label="test")
        """Past any proxy that stands before the log of the processors."""

    async def __aenter__(self) -> Self:
        await self.log.open()
        self._stack.push_async_callback(self.engine.dispose)
        self._stack.push_async_callback(self.log.close)
        for spec in _compose.streams(self.settings):
            await self.log.declare(spec)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    # ---- publishing

    async def publish(self, items: Sequence[object] | bytes) -> str:
        """Publish a list as `afluente publish` does; answers the batch id."""
        body = items if isinstance(items, bytes) else json.dumps(items, ensure_ascii=False).encode()
        await _publish.publish(self.log, _compose.imports_spec(self.settings), body)
        return batch_id(body)

    async def put(self, *records: bytes, stream: str | None = None, partition: int = 0) -> None:
        """Append records as they are, by default to the imports."""
        target = (await self.log.partitions(stream or self.settings.imports_stream))[partition]
        publisher = await self.log.publisher(target)
        await publisher.publish(records)
        await publisher.close()

    # ---- looking

    async def sql(self, statement: str, **parameters: object) -> list[dict[str, Any]]:
        """SQL as a person types it."""
        return await query(self.engine, statement, **parameters)

    async def now(self) -> float:
        """The database's clock, in seconds since 1970."""
        [row] = await self.sql(f"SELECT {from_now(self.engine, 0)} AS now")
        return seconds(row["now"])

    async def rows(self) -> list[dict[str, Any]]:
        """All dispatches, in the order of their index in the batch."""
        return await self.sql("SELECT * FROM email_dispatches ORDER BY batch_id, batch_index")

    async def row(self, number: int) -> dict[str, Any]:
        """The dispatch of `person(number)`; an AssertionError while there is none."""
        rows = await self.sql('SELECT * FROM email_dispatches WHERE "to" = :to', to=address(number))
        assert len(rows) == 1, f"{len(rows)} rows of {address(number)}"
        return rows[0]

    async def count(self, condition: str) -> int:
        """How many dispatches meet an SQL condition."""
        [row] = await self.sql(f"SELECT count(*) AS n FROM email_dispatches WHERE {condition}")
        return int(row["n"])

    async def attempts(self) -> dict[str, int]:
        """The attempts of each recipient."""
        return {row["to"]: row["attempts"] for row in await self.rows()}

    async def dead_letters(self) -> list[dict[str, Any]]:
        """All of them, in order."""
        return await self.sql("SELECT * FROM dead_letters ORDER BY id")

    async def status(self) -> _status.Status:
        """What `afluente status` shows."""
        log = open_log(self.site.log_url, label="status")
        try:
            return await _status.status(self.engine, log, _compose.readers(self.settings), 20)
        finally:
            await log.close()

    async def batch(self, batch: str) -> _status.BatchStatus:
        """What `status` shows of one batch."""
        found = [b for b in (await self.status()).batches if b.batch_id == batch]
        assert len(found) == 1, "the splitter has not seen it yet"
        assert found[0].adds_up
        return found[0]

    async def received(self, batch: str, times: int) -> None:
        """An AssertionError until the splitter has counted the batch so many times."""
        assert (await self.batch(batch)).times_received == times

    def mails(self) -> Counter[str]:
        """How many mails each address got."""
        return Counter(recipient for mail in self.sink.mails for recipient in mail.recipients)

    async def recipients(self) -> list[Message]:
        """Every message in the stream of recipients. On the embedded log only while no other process reads."""
        found: list[Record] = []
        log = self.reader
        for partition in await log.partitions(self.settings.recipients_stream):
            bounds = await log.bounds(partition)
            subscription = await log.subscribe(partition, "test", NotingOwner(bounds.first))
            last = bounds.first - 1
            while last < bounds.next - 1:
                await asyncio.wait_for(subscription.ready(), 20)
                found += (records := subscription.take(5_000))
                last = records[-1].offset if records else last
            await subscription.close()
        return [decode(record.data) for record in found]

    async def stored(self) -> int:
        """How many messages the stream of recipients has at most: the sum of its ends."""
        return sum(
            [(await self.log.bounds(p)).next for p in await self.log.partitions(self.settings.recipients_stream)]
        )

    @property
    def reader(self) -> Log:
        """The log through which the test may subscribe."""
        return self.log

    # ---- waiting

    async def settled(self, rows: int, timeout: float = 30.0) -> None:
        """Wait until so many rows are sent or failed, none waits, and every reader is at the end of its stream."""

        async def is_settled() -> None:
            self.check()
            counted = {r["status"]: r["n"] for r in await self.sql(_COUNT)}
            done = counted.get("sent", 0) + counted.get("failed", 0)
            assert (done, counted.get("pending", 0)) == (rows, 0), counted
            await self._is_caught_up()

        await eventually(is_settled, timeout)

    async def caught_up(self, timeout: float = 30.0) -> None:
        """Wait until every reader is at the end of its stream, whatever the rows still wait for."""

        async def is_caught_up() -> None:
            self.check()
            await self._is_caught_up()

        await eventually(is_caught_up, timeout)

    async def noticed(self, processor: str) -> None:
        """Wait until a running processor has looked at all its positions anew."""
        for _ in range(2):
            asked = await self.now()

            async def has_looked(since: float = asked) -> None:
                self.check()
                rows = await self.sql("SELECT seen_at FROM processor_offsets WHERE processor = :p", p=processor)
                assert rows
                assert all(row["seen_at"] and seconds(row["seen_at"]) > since for row in rows)

            await eventually(has_looked)

    async def _is_caught_up(self) -> None:
        saved = {(r["processor"], r["partition"]): r["next_offset"] for r in await self.sql(_OFFSETS)}
        for processor, stream in _compose.readers(self.settings).items():
            for partition in await self.log.partitions(stream):
                end = (await self.log.bounds(partition)).next
                at = saved.get((processor, partition.index), 0)
                assert at == end, f"{processor} {partition.index} at {at} of {end}"

    def check(self) -> None:
        """Raise what has ended a process early."""


_COUNT = "SELECT status, count(*) AS n FROM email_dispatches GROUP BY status"
_OFFSETS = "SELECT processor, partition, next_offset FROM processor_offsets"


class Job(Looks):
    """Looks, and the processors of one site on the test's own loop. `mailers` is how many of them run side by side."""

    def __init__(
        self, site: Site, sink: Sink, *, processors: Sequence[str] = PROCESSORS, mailers: int = 1, **changes: Any
    ) -> None:
        super().__init__(site, sink, **changes)
        self._names, self._mailers = list(processors), mailers
        self.metrics = Metrics(CollectorRegistry())
        self.house: House | None = None
        self._stop = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        try:
            await self.start()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        try:
            await self.stop()
        finally:
            await super().__aexit__(kind, error, at)

    async def start(self) -> None:
        """Start the processors, as after a deploy."""
        self._stop = asyncio.Event()
        self.house = None
        self._running = asyncio.create_task(self._run(self._names, self._mailers - 1))

        def is_open() -> None:
            self.check()
            assert self.house is not None

        await eventually(is_open)

    async def _run(self, names: Sequence[str], more_mailers: int) -> None:
        """One process; more mailers are processes of their own, but not on the embedded log, which allows only one."""
        async with asyncio.TaskGroup() as tasks, open_house(self.settings, "job", self.metrics) as house:
            self.house = self.house or house
            parts = [tasks.create_task(run_processors(house, names, self._stop))]
            for _ in range(more_mailers):
                if self.site.kind == "embedded":
                    parts.append(tasks.create_task(run_processors(house, ["mailer"], self._stop)))
                else:
                    tasks.create_task(self._run(["mailer"], 0))
            await asyncio.wait(parts)

    async def stop(self) -> None:
        """Stop them as SIGTERM does, and wait until they have ended."""
        self._stop.set()
        running, self._running = self._running, None
        if running is not None:
            await running

    async def crash(self) -> None:
        """End them as a kill does, as far as that is possible inside of a process."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.wait({running})

    def check(self) -> None:
        if self._running is not None and self._running.done():
            self._running.result()
            raise RuntimeError("the processors have ended by themselves")

    @property
    def reader(self) -> Log:
        return self.house.log if self.site.kind == "embedded" and self._running and self.house else self.log

    def metric(self, name: str, **labels: str) -> float | None:
        """One series of /metrics, None if there is none."""
        return self.metrics.registry.get_sample_value(name, labels)
