"""Intake in the test's own process between a queue and a stream of its own; proxies before both; ways to look.

The database that its settings name does not exist: intake must not miss it.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from uuid import uuid4

from prometheus_client import CollectorRegistry
from typer.testing import CliRunner, Result

from processors.__main__ import app
from processors._amqp import Channel, Connection, Delivery
from processors._house import House, open_house
from processors._management import Management as RealManagement
from processors._queues import Queues
from processors._serve import run_processors
from processors._settings import Settings
from streams.log import Record
from streams.message import Message, decode
from streams.rabbitmq import RabbitLog
from streams.telemetry import Metrics
from streams.testing import NotingOwner, collect, eventually
from tests.conftest import Services
from tests.support.broker import Management
from tests.support.tcpproxy import TcpProxy

NOWHERE = "postgresql+asyncpg://nobody@127.0.0.1:1/nothing"


def amqp_url(services: Services, port: int | None = None, options: str = "") -> str:
    """AMQP_URL of the development broker."""
    return f"amqp://{services.user}:{services.password}@{services.host}:{port or services.amqp_port}/{options}"


class Stage:
    """One test's queue and stream. What is declared here is deleted when the test is over."""

    def __init__(self, services: Services, amqp: TcpProxy, stream: TcpProxy) -> None:
        self.services, self.amqp, self.stream = services, amqp, stream
        self.name = f"intake-{uuid4().hex[:12]}"
        self.queues = Queues(f"{self.name}-exchange", "draft", f"{self.name}-queue")
        self.management = Management(services)
        self.metrics = Metrics(CollectorRegistry())
        self.connection: Connection
        self.channel: Channel
        """Past the proxy."""
        self._stop = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._house: House | None = None

    @property
    def streams(self) -> dict[str, str]:
        """The setting of every stream, and its name here."""
        kinds = [name.removesuffix("_stream") for name in Settings.model_fields if name.endswith("_stream")]
        return {f"{kind.upper()}_STREAM": f"{self.name}-{kind.replace('_', '-')}" for kind in kinds}

    @property
    def imports(self) -> str:
        """The name of the stream that intake writes to."""
        return self.streams["IMPORTS_STREAM"]

    def environment(self, **changes: object) -> dict[str, str]:
        """All settings of intake; `changes` win, and None leaves a variable out."""
        user = f"{self.services.user}:{self.services.password}"
        values: dict[str, object] = {
            "DATABASE_URL": NOWHERE,
            "LOG_URL": f"rabbitmq-stream://{user}@127.0.0.1:{self.stream.port}/",
            **self.streams,
            "AMQP_URL": amqp_url(self.services, self.amqp.port),
            "AMQP_EXCHANGE": self.queues.exchange,
            "AMQP_ROUTING_KEY": self.queues.routing_key,
            "AMQP_QUEUE": self.queues.queue,
            "AMQP_RETRY_WAITS_SECONDS": "0.05,0.1",
            "MANAGEMENT_URL": f"http://{user}@127.0.0.1:{self.services.management_port}",
            "PROBES_PORT": 0,
            "LOG_FORMAT": "json",
        }
        return {name: str(value) for name, value in {**values, **changes}.items() if value is not None}

    # ---- intake

    async def start(self, **changes: object) -> None:
        """Run intake, and wait until it consumes."""
        values: dict[str, Any] = {name.lower(): value for name, value in self.environment(**changes).items()}
        settings, self._stop = Settings(_env_file=None, **values), asyncio.Event()
        ready = asyncio.Event()

        async def run() -> None:
            async with open_house(settings, "test", self.metrics, database=False) as house:
                running = asyncio.ensure_future(run_processors(house, ["intake"], self._stop))
                try:
                    self._house = house
                    await eventually(lambda: self._is_consuming_or(running))
                    if not running.done():
                        ready.set()
                finally:
                    await running

        self._running = asyncio.create_task(run())
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({self._running, waiting}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._running.done():
            ended, self._running = self._running, None
            ended.result()

    async def consuming(self) -> None:
        """Wait until intake consumes (again)."""
        await eventually(self._is_consuming)

    def _is_consuming_or(self, ended: "asyncio.Future[None]") -> None:
        if not ended.done():
            self._is_consuming()

    def _is_consuming(self) -> None:
        self.check()
        assert self._house is not None
        assert "intake" in self._house.checks
        assert self._house.checks["intake"]() is None

    async def stop(self) -> None:
        """Stop intake as SIGTERM does, and wait until it has ended."""
        self._stop.set()
        running, self._running = self._running, None
        if running is not None:
            await asyncio.wait_for(running, 20)

    async def publisher_declares(self) -> None:
        """What the publisher does before it publishes: exchange, queue without arguments, binding."""
        channel = await self.connection.channel()
        await channel.declare_exchange(self.queues.exchange)
        await channel.declare_queue(self.queues.queue)
        await channel.bind(self.queues.exchange, self.queues.queue, self.queues.routing_key)
        await channel.close()

    async def publish(self, body: bytes | Sequence[object], **properties: object) -> None:
        """Publish a list as the publisher does."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.channel.publish(
            self.queues.exchange, self.queues.routing_key, data, {"delivery_mode": 2, **properties}
        )

    async def apply_policy(self) -> None:
        """Have the broker dead-letter by itself, and wait until it says so."""
        definition = {
            "dead-letter-exchange": self.queues.dead_exchange,
            "dead-letter-routing-key": self.queues.dead_queue,
        }
        await self.put_policy(definition)

    async def put_policy(self, definition: Mapping[str, object]) -> None:
        """Have the queue under a policy of the test's own."""
        policy = {"pattern": f"^{self.queues.queue}$", "apply-to": "queues", "definition": definition}
        await self.management.call("PUT", "policies", "/", self.name, body=policy)

        user = f"{self.services.user}:{self.services.password}"

        async def is_in_force() -> None:
            url = f"http://{user}@127.0.0.1:{self.services.management_port}"
            info = await RealManagement(url, "/").queue(self.queues.queue)
            assert info is not None
            assert info.get("policy") == self.name

        await eventually(is_in_force)

    async def command(self, *arguments: str, **changes: object) -> Result:
        """Run `afluente` with these settings in a thread of this process."""
        environment = dict.fromkeys(map(str.upper, Settings.model_fields), "") | self.environment(**changes)
        runner = CliRunner(env={**environment, "COLUMNS": "200"})
        return await asyncio.to_thread(runner.invoke, app, arguments, prog_name="afluente")

    # ---- looking

    async def ready(self, queue: str | None = None) -> int:
        """How many messages wait in a queue (the publisher's, if none is named)."""
        channel = await self.connection.channel()
        count = await channel.declare_queue(queue or self.queues.queue, passive=True)
        await channel.close()
        return count

    async def settled(self, done: int, dead: int = 0) -> None:
        """Wait until intake has settled so many."""

        def is_settled() -> None:
            self.check()
            assert (self.count("done"), self.count("dead")) == (done, dead)

        await eventually(is_settled, 30)

    def count(self, outcome: str) -> int:
        """How many deliveries ended so: done, dead."""
        return int(self.metric("afluente_records_total", outcome=outcome))

    def metric(self, name: str, **labels: str) -> float:
        """One series of /metrics."""
        labels = labels if "service" in labels else {"processor": "intake", **labels}
        return self.metrics.registry.get_sample_value(name, labels) or 0

    def check(self) -> None:
        """Raise what has ended intake early."""
        if self._running is not None and self._running.done():
            self._running.result()

    async def letters(self) -> list[Delivery]:
        """All dead letters; they stay where they are."""
        return await self.messages(self.queues.dead_queue)

    async def messages(self, queue: str) -> list[Delivery]:
        """All that is ready in a queue; it stays there."""
        channel = await self.connection.channel()
        found = []
        while (delivery := await channel.get(queue)) is not None:
            found.append(delivery)
        await channel.close()
        return found

    async def records(self) -> list[Message]:
        """All that is in the stream of imports."""
        log = RabbitLog(self.services.log_url, label="test")
        await log.open()
        try:
            [partition] = await log.partitions(self.imports)
            bounds = await log.bounds(partition)
            subscription = await log.subscribe(partition, "test", NotingOwner(bounds.first))
            found: list[Record] = await collect(subscription, bounds.next) if bounds.next else []
            return [decode(record.data) for record in found]
        finally:
            await log.close()

    async def items(self) -> list[Any]:
        """All items of all lists in the stream."""
        return [item for record in await self.records() for item in json.loads(record.body)]

    async def clear(self) -> None:
        """End intake, delete everything."""
        try:
            await self.stop()
        finally:
            await self.connection.close()
            await self.management.call("DELETE", "policies", "/", self.name)
            for queue in (self.queues.queue, self.queues.dead_queue):
                await self.management.call("DELETE", "queues", "/", queue)
            for exchange in (self.queues.exchange, self.queues.dead_exchange):
                await self.management.call("DELETE", "exchanges", "/", exchange)
            for stream in self.streams.values():
                await self.management.delete(stream)


@asynccontextmanager
async def new_stage(services: Services) -> AsyncIterator[Stage]:
    """A stage for the time of the block; the exchange and queue are declared as the publisher does, empty."""
    async with AsyncExitStack() as stack:
        amqp = await stack.enter_async_context(TcpProxy(services.amqp_port))
        stream = await stack.enter_async_context(TcpProxy(services.stream_port))
        stage = Stage(services, amqp, stream)
        stage.connection = await Connection.open(amqp_url(services), "test")
        stack.push_async_callback(stage.clear)
        stage.channel = await stage.connection.channel()
        await stage.publisher_declares()
        yield stage
