"""A row processor and a transform whose steps a test scripts, and what it takes to run them on a log of one's own."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncEngine

from processors.mailer.processor import TABLE
from streams.breaker import BreakerPolicy
from streams.dead_letters import DeadLetter
from streams.errors import Reject
from streams.log import Log, Partition, Record, StreamSpec
from streams.message import Message
from streams.processor import Claim, Gate, Limits, NewRow, RowRef, RowTable, Transformed
from streams.recovery import RecoveryPolicy
from streams.relay import Relay, Tail
from streams.runtime import Runtime
from streams.sql import Row, Sql
from streams.telemetry import Metrics
from streams.testing import eventually
from streams.transforms import TransformRuntime
from tests.support.databases import query

STREAM, NAME, RETRY = "recipients", "mailer", "email.retry"

LIMITS = Limits(
    turn_records=50,
    slots=4,
    in_doubt=4,
    recovery=RecoveryPolicy(max_attempts=3, backoff=(0.2,), jitter=0.0),
    breaker=BreakerPolicy(threshold=20, probe_seconds=0.2, probe_max_seconds=0.4),
    act_timeout=8.0,
    reply_timeout=1.0,
    commit_allowance=1.0,
    lease=12.0,
    idle_look=0.1,
    visibility=1.0,
    database_away=20.0,
    relay_poll=0.05,
)
"""Short times, and few slots, so that a handful of rows fills them."""


def metrics() -> Metrics:
    """Metrics that nobody else sees."""
    return Metrics(CollectorRegistry())


def first(key: str) -> bytes:
    """A first message: the row with this key, unless there is one."""
    return Message(key, "recipient", 1, 1, b"{}").encode()


def hint(row_id: int) -> bytes:
    """A later message: look at the row with this id."""
    return Message(str(row_id), RETRY, 1, 2, b"{}").encode()


def new_row(key: str, **more: object) -> NewRow:
    """A row of email_dispatches with this key."""
    values = {"to": f"{key}@example.com", "subject": "s", "content": "c", "mailable_type": "m", "meta": {"n": key}}
    return NewRow(key, {**values, **more})


class Scripted:
    """See `streams.processor.RowProcessor`. A key is sent, unless the test says before what else happens to it."""

    name = NAME
    table: RowTable = TABLE
    reports_failures = False

    def __init__(self, stream: str = STREAM) -> None:
        self.stream = stream
        self.claims: list[Claim] = []
        """Every act that began, in order."""
        self.sent: Counter[str] = Counter()
        """What went out, whether or not it was recorded."""
        self.running: set[str] = set()
        self.most_running = 0
        self.known_keys: list[str] = []
        self.errors: dict[str, list[Exception]] = defaultdict(list)
        """Raised by the next acts of a key, one each."""
        self.always: dict[str, Exception] = {}
        """Raised by every act of a key."""
        self.outage: Exception | None = None
        """While set, every act and every probe raises it."""
        self.impossible: dict[str, Exception] = {}
        """Raised by plan for a key."""
        self.values: dict[str, Mapping[str, object]] = {}
        """Columns of a key's new row that differ from the usual ones."""
        self.stored: dict[str, Mapping[str, object]] = {}
        """What an act answers."""
        self._blocked: dict[str, asyncio.Event] = {}
        self.all_may_go = asyncio.Event()
        self.all_may_go.set()

    def block(self, key: str) -> asyncio.Event:
        """Acts of this key wait, before the gate, until the event that is answered is set."""
        return self._blocked.setdefault(key, asyncio.Event())

    # ---- what the engine calls

    def plan(self, message: Message) -> NewRow | RowRef:
        if message.id in self.impossible:
            raise self.impossible[message.id]
        if message.type == RETRY:
            return RowRef(int(message.id))
        return new_row(message.id, **self.values.get(message.id, {}))

    async def known(self, sql: Sql, rows: Sequence[tuple[NewRow, Row]]) -> None:
        self.known_keys += [row.key for row, _ in rows]

    async def act(self, claim: Claim, gate: Gate) -> Mapping[str, object]:
        key = str(claim.key)
        self.claims.append(claim)
        self.running.add(key)
        self.most_running = max(self.most_running, len(self.running))
        try:
            return await self._act(key, gate)
        finally:
            self.running.discard(key)

    async def _act(self, key: str, gate: Gate) -> Mapping[str, object]:
        await self.all_may_go.wait()
        if key in self._blocked:
            await self._blocked[key].wait()
        error = self.outage or (self.errors[key].pop(0) if self.errors[key] else self.always.get(key))
        if error is not None:
            raise error
        await gate.wait()
        gate.check()
        self.sent[key] += 1
        return self.stored.get(key, {})

    async def probe(self) -> None:
        if self.outage is not None:
            raise self.outage

    def acts(self, key: str) -> int:
        """How many acts of this key began."""
        return sum(claim.key == key for claim in self.claims)


class Numbered:
    """See `streams.processor.Transform`. A record `a,b,c` becomes one message for each letter."""

    name = "splitter"
    target = STREAM
    stride = 100

    def __init__(self, stream: str = "imports", version: int = 1) -> None:
        self.stream, self.version = stream, version
        self.impossible: set[str] = set()
        """Items that this version of the code rejects."""
        self.kills: BaseException | None = None
        """Raised by the record `kill`."""

    def publisher_name(self, partition: int, epoch: int) -> str:
        return f"{self.name}/{self.stream}/{partition}/e{epoch}/v{self.version}"

    def transform(self, message: Message, offset: int, partitions: int) -> Iterator[Transformed | None]:
        yield None
        items = message.body.decode().split(",")
        if items == ["kill"] and self.kills is not None:
            raise self.kills
        if items == ["reject"]:
            raise Reject("rejected", "as the test wants it")
        outgoing: list[list[tuple[int, bytes]]] = [[] for _ in range(partitions)]
        for index, item in enumerate(items):
            if item not in self.impossible:
                outgoing[index % partitions].append((offset * self.stride + index + 1, first(item)))
        yield Transformed(outgoing)

    async def record(
        self, sql: Sql, records: Sequence[Record], partition: Partition, results: Sequence[Transformed]
    ) -> Sequence[DeadLetter]:
        """Counts how often each record was counted, in the transaction that moves the offset."""
        for record in records:
            await sql.fetch(
                """INSERT INTO import_slices (stream, partition, source_offset, batch_id, items)
                VALUES ($1, $2, $3, 'b', 1) ON CONFLICT (stream, partition, source_offset, batch_id)
                DO UPDATE SET items = import_slices.items + 1""",
                partition.stream,
                partition.index,
                record.offset,
            )
        return []


def batch(*items: str) -> bytes:
    """A record for `Numbered`."""
    return Message("", "import", 1, 1, ",".join(items).encode()).encode()


# ---- running


class Runs(Protocol):
    """A runtime or a relay."""

    async def run(self, stop: asyncio.Event) -> None: ...


@asynccontextmanager
async def running(*parts: Runs) -> AsyncIterator[None]:
    """Run these for the time of the block, then stop them as SIGTERM does. An error of one of them ends the block."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for part in parts:
            tasks.create_task(part.run(stop))
        try:
            yield
        finally:
            stop.set()


async def crash(task: "asyncio.Task[None]", log: Log) -> None:
    """End a `run` as a kill does, as far as that is possible inside of a process: nothing more is sent or recorded."""
    task.cancel()
    with suppress(asyncio.CancelledError, ExceptionGroup):
        await task
    await log.close()


class Stage:
    """A database, a log, and the processor between them."""

    def __init__(self, engine: AsyncEngine, log: Log, limits: Limits = LIMITS) -> None:
        self.engine, self.log, self.limits = engine, log, limits
        self.processor = Scripted()

    async def declare(self, partitions: int = 1) -> None:
        """Make the stream."""
        await self.log.declare(StreamSpec(STREAM, partitions))

    def change(self, **limits: Any) -> None:
        """Other limits for what is made from now on."""
        self.limits = replace(self.limits, **limits)

    def runtime(self, step: Callable[[str], None] = lambda name: None, log: Log | None = None) -> Runtime:
        """A process that runs the processor."""
        return Runtime(self.processor, log or self.log, self.engine, self.limits, metrics(), step)

    def transforming(
        self, transform: Numbered, step: Callable[[str], None] = lambda name: None, log: Log | None = None
    ) -> TransformRuntime:
        """A process that runs a transform."""
        return TransformRuntime(transform, log or self.log, self.engine, self.limits, metrics(), step)

    def relay(self) -> Relay:
        """A relay of the table, quick enough for a test."""

        def message(row: Row) -> Message:
            return Message(str(row["id"]), RETRY, 1, row["attempts"] + 1, b"{}")

        tail = Tail(TABLE, STREAM, NAME, message)
        return Relay(tail, self.log, self.engine, replace(self.limits, relay_poll=0.05), metrics())

    async def publish(self, *messages: bytes, partition: int = 0, stream: str = STREAM) -> None:
        """Append to a partition."""
        target = (await self.log.partitions(stream))[partition]
        await (await self.log.publisher(target)).publish(list(messages))

    # ---- looking

    async def query(self, statement: str, **parameters: object) -> list[dict[str, Any]]:
        """SQL as a person types it."""
        return await query(self.engine, statement, **parameters)

    async def row(self, key: str) -> dict[str, Any]:
        """The row of a key; an AssertionError while there is none."""
        rows = await self.query("SELECT * FROM email_dispatches WHERE idempotency_key = :key", key=key)
        assert rows, f"there is no row {key}"
        return rows[0]

    async def count(self, condition: str) -> int:
        """How many rows meet an SQL condition."""
        [row] = await self.query(f"SELECT count(*) AS n FROM email_dispatches WHERE {condition}")
        return int(row["n"])

    async def position(self, partition: int = 0, processor: str = NAME) -> dict[str, Any]:
        """The row of processor_offsets; an AssertionError while there is none."""
        rows = await self.query(
            "SELECT * FROM processor_offsets WHERE processor = :processor AND partition = :partition",
            processor=processor,
            partition=partition,
        )
        assert rows, "there is no position yet"
        return rows[0]

    async def dead_letters(self) -> list[dict[str, Any]]:
        """All of them, in order."""
        return await self.query("SELECT * FROM dead_letters ORDER BY id")

    # ---- waiting

    async def until(self, assertion: Callable[[], Awaitable[object] | object]) -> None:
        """Wait until the assertion holds."""
        await eventually(assertion)

    async def all_sent(self, keys: Sequence[str]) -> None:
        """Wait until exactly these are sent."""

        async def are_sent() -> None:
            rows = await self.query("SELECT idempotency_key AS key, status FROM email_dispatches")
            states = {row["key"]: row["status"] for row in rows}
            assert states == dict.fromkeys(keys, "sent")

        await eventually(are_sent)

    async def begun(self, *keys: str) -> None:
        """Wait until acts of all these keys are under way."""

        def are_running() -> None:
            assert self.processor.running >= set(keys)

        await eventually(are_running)

    async def status(self, key: str, status: str) -> dict[str, Any]:
        """Wait until the row of a key has this status; answers the row."""

        async def has_status() -> dict[str, Any]:
            row = await self.row(key)
            assert row["status"] == status, row
            return row

        return await eventually(has_status)

    async def offset_is(self, offset: int, partition: int = 0, processor: str = NAME) -> None:
        """Wait until the saved position is there."""

        async def is_there() -> None:
            assert (await self.position(partition, processor))["next_offset"] == offset

        await eventually(is_there)
