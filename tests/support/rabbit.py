"""What a test of faults between us and the broker needs: logs behind a proxy, one that is spared, fresh streams."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from streams.log import Partition, Record, StreamSpec
from streams.rabbitmq import RabbitLog
from streams.testing import NotingOwner, collect
from tests.conftest import Services
from tests.support.broker import Management, new_name
from tests.support.tcpproxy import TcpProxy


class Rabbit:
    """One test's broker. What it opens and declares is closed and deleted when the test is over."""

    def __init__(self, services: Services, proxy: TcpProxy) -> None:
        self.proxy = proxy
        self.services = services
        self.management = Management(services)
        self.spared = RabbitLog(services.log_url)
        """Opened; its connections do not go through the proxy."""
        self._logs: list[RabbitLog] = [self.spared]
        self._specs: dict[str, StreamSpec] = {}

    @property
    def url(self) -> str:
        """LOG_URL of the broker behind the proxy."""
        return f"rabbitmq-stream://{self.services.user}:{self.services.password}@127.0.0.1:{self.proxy.port}/"

    async def new_log(
        self, *, heartbeat: int = 5, confirm_timeout: float = 30.0, label: str = "test", direct: bool = False
    ) -> RabbitLog:
        """An opened log; behind the proxy unless `direct`."""
        url = self.services.log_url if direct else self.url
        log = RabbitLog(url, heartbeat=heartbeat, confirm_timeout=confirm_timeout, label=label)
        self._logs.append(log)
        await log.open()
        return log

    async def new_partition(self, **spec: int) -> Partition:
        """The only partition of a new plain stream."""
        return (await self.new_stream(**spec))[0]

    async def new_stream(self, partitions: int = 0, **spec: int) -> list[Partition]:
        """The partitions of a new stream."""
        name = new_name()
        self._specs[name] = StreamSpec(name, partitions, **spec)
        await self.spared.declare(self._specs[name])
        return await self.spared.partitions(name)

    def spec(self, partition: Partition) -> StreamSpec:
        """How the stream of this partition was declared."""
        return self._specs[partition.stream]

    async def publish(self, partition: Partition, messages: Sequence[bytes]) -> None:
        """Publish without a name, past the proxy."""
        publisher = await self.spared.publisher(partition)
        await publisher.publish(messages)
        await publisher.close()

    async def stored(self, partition: Partition) -> list[bytes]:
        """All that is stored, read past the proxy up to a mark that is published for it."""
        mark = new_name().encode()
        await self.publish(partition, [mark])
        subscription = await self.spared.subscribe(partition, new_name(), NotingOwner())
        found: list[Record] = []
        while not found or found[-1].data != mark:
            found += await collect(subscription, 1)
            found += subscription.take(10_000)
        await subscription.close()
        return [record.data for record in found[:-1]]

    async def clear(self) -> None:
        """Close every log, delete every stream."""
        for log in self._logs:
            await log.close()
        for stream in self._specs:
            await self.management.delete(stream)


@asynccontextmanager
async def rabbit_behind_proxy(services: Services) -> AsyncIterator[Rabbit]:
    """A `Rabbit` for the time of the block."""
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(TcpProxy(services.stream_port))
        rabbit = Rabbit(services, proxy)
        stack.push_async_callback(rabbit.clear)
        await rabbit.spared.open()
        yield rabbit
