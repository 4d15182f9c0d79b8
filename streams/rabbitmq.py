"""RabbitMQ Streams as the engine's log. With its private neighbours the only place that knows rstream.

    _rabbitmq_url           LOG_URL, taken apart
    _rabbitmq_connection    one connection, its watchdog, rstream's errors in our words
    _rabbitmq_publisher     confirms, and resending exactly once
    _rabbitmq_subscription  reading as one of a group, hand-over, reconnecting
    _rabbitmq_bounds        exact bounds

It remembers no offsets and decodes no messages.
"""

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import structlog
from rstream import exceptions

from streams._rabbitmq_bounds import BoundsReader
from streams._rabbitmq_connection import Connection
from streams._rabbitmq_publisher import RabbitPublisher
from streams._rabbitmq_subscription import RabbitSubscription
from streams._rabbitmq_url import Address, parse_url
from streams.errors import BadSettings, LogError, LogRefused, StreamMissing
from streams.log import Bounds, Owner, Partition, Record, StreamSpec

__all__ = ["RabbitLog"]

log = structlog.get_logger(__name__)

READ_RECORDS = 1_000
SILENCE_SECONDS = 30.0
MAKING_TRIES = 12
"""How often a super stream is looked at that has too few partitions yet: for about three seconds."""


class RabbitLog:
    """`streams.log.Log` on a broker.

    `url`: see `parse_url`. `ca_file`: PEM file of the authorities to trust instead of the system's, TLS only.
    `heartbeat` (s): a connection silent for 2.5 times as long is given up. `confirm_timeout` (s): a publisher that gets
    no confirm for so long replaces its connection. `label`: first word of the connections' names in the broker's
    management. Raises BadSettings.
    """

    def __init__(
        self,
        url: str,
        *,
        ca_file: Path | None = None,
        heartbeat: int = 5,
        confirm_timeout: float = 30.0,
        label: str = "afluente",
    ) -> None:
        self._address = parse_url(url)
        self._ssl_context = _trust(self._address, ca_file)
        self._heartbeat = heartbeat
        self._confirm_timeout = confirm_timeout
        self._label = label
        self._asking = asyncio.Lock()
        self._reader: BoundsReader | None = None
        self._subscriptions: list[RabbitSubscription] = []
        self._publishers: list[RabbitPublisher] = []

    def __repr__(self) -> str:
        return f"RabbitLog({self._address})"

    @property
    def connected(self) -> bool:
        """See `streams.log.Log`. A connection that waits for its next use is made anew then, and does not count."""
        return all(subscription.connected for subscription in self._subscriptions) and not any(
            publisher.reconnecting for publisher in self._publishers
        )

    async def open(self) -> None:
        """Log in once, to know early. Raises LogError or LogRefused."""
        await self._admin()

    async def close(self) -> None:
        """Close everything that was opened here. Bounded in time."""
        await asyncio.gather(*(s.close() for s in self._subscriptions), *(p.close() for p in self._publishers))
        self._subscriptions.clear()
        self._publishers.clear()
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.connection.close()

    async def declare(self, spec: StreamSpec) -> None:
        """See `streams.log.Log`; LogRefused also for the other kind, and for a plain stream with another retention."""
        connection = (await self._admin()).connection
        plain = await self._exists(connection, spec.name)
        names = [] if plain else await self._partition_names(connection, spec.name)
        if names and not spec.partitions:
            raise LogRefused(f"{spec.name} exists as a super stream of {len(names)} partitions, not as a plain stream")
        if plain and spec.partitions:
            raise LogRefused(f"{spec.name} exists as a plain stream, not as a super stream")
        if not spec.partitions:
            return await self._create(connection, connection.client.create_stream(spec.name, _arguments(spec)), spec)
        if len(names) < spec.partitions:
            names = await self._made(spec)
        # The broker accepts a super stream that exists with any other number of partitions without a word.
        if len(names) != spec.partitions:
            raise LogRefused(
                f"{spec.name} exists with {len(names)} partitions, asked for are {spec.partitions}; their number "
                "cannot be changed: drain and delete it, or correct the setting"
            )
        return None

    async def _made(self, spec: StreamSpec) -> list[str]:
        """Make a super stream and answer its partitions, also when others make it at this moment.

        The broker makes partitions, exchange and bindings one after the other; who comes in between is refused, and
        may leave a part of it, or take a part of it away. So it is looked at again, and made again, for some seconds.
        That helps mostly, not always: `afluente topology apply` before the first start is the sound way.
        """
        for left in reversed(range(MAKING_TRIES)):
            connection = (await self._admin()).connection
            names = await self._partition_names(connection, spec.name)
            if len(names) >= spec.partitions or not left:
                return names
            try:
                if not names:
                    await self._create_super_stream(connection, spec)
            except LogError as error:
                log.info("stream.made_by_others_too", stream=spec.name, error=str(error))
            await asyncio.sleep(random.uniform(0.1, 0.5))
        return []

    async def partitions(self, stream: str) -> list[Partition]:
        """See `streams.log.Log`."""
        connection = (await self._admin()).connection
        # In this order, because the broker logs an error when it is asked for the partitions of a plain stream.
        plain = await self._exists(connection, stream)
        names = [stream] if plain else await self._partition_names(connection, stream)
        if not names:
            raise StreamMissing(f"there is no stream {stream}")
        return [Partition(stream, index, name) for index, name in enumerate(names)]

    async def bounds(self, partition: Partition) -> Bounds:
        """See `streams.log.Log`."""
        reader = await self._admin()
        try:
            return await reader.bounds(partition.name)
        except LogError:
            # A node without a replica refuses; the next connection may lead to another node.
            reader.connection.drop("could not answer")
            raise

    async def written_at(self, partition: Partition, offset: int) -> int | None:
        """See `streams.log.Log`."""
        reader = await self._admin()
        try:
            return await reader.written_at(partition.name, offset)
        except LogError:
            reader.connection.drop("could not answer")
            raise

    async def read(self, partition: Partition, first: int, end: int) -> AsyncIterator[list[Record]]:
        """See `streams.log.Log`. LogError when the broker falls silent in the middle."""
        if first >= end:
            return
        reader = _Alone(first)
        subscription = await self.subscribe(partition, f"read-{uuid4().hex}", reader)
        try:
            while reader.position < end:
                await _records_come(subscription)
                if records := subscription.take(READ_RECORDS):
                    reader.position = records[-1].offset + 1
                    yield [record for record in records if record.offset < end]
        finally:
            await subscription.close()

    async def subscribe(self, partition: Partition, group: str, owner: Owner) -> RabbitSubscription:
        """See `streams.log.Log`; StreamMissing if there is no such partition."""
        subscription = RabbitSubscription(self._connect, partition, group, owner)
        await subscription.open()
        self._subscriptions = [s for s in self._subscriptions if not s.closed] + [subscription]
        return subscription

    async def publisher(self, partition: Partition, name: str | None = None) -> RabbitPublisher:
        """See `streams.log.Log`; ValueError for a second live publisher of a name, which would swallow the other's."""
        self._publishers = [publisher for publisher in self._publishers if not publisher.closed]
        if name is not None and any((p.name, p.partition) == (name, partition) for p in self._publishers):
            raise ValueError(f"there is a publisher {name!r} for {partition.name} already")
        publisher = RabbitPublisher(self._connect, partition, name, self._confirm_timeout)
        self._publishers.append(publisher)
        try:
            await publisher.open()
        except BaseException:
            self._publishers.remove(publisher)
            raise
        return publisher

    async def _connect(self, purpose: str) -> Connection:
        label = f"{self._label} {purpose}"
        return await Connection.open(self._address, label, self._heartbeat, self._ssl_context)

    async def _admin(self) -> BoundsReader:
        """The connection for questions; a new one if the last is lost."""
        async with self._asking:
            if self._reader is None or self._reader.connection.lost.done():
                self._reader = BoundsReader(await self._connect("questions"))
            return self._reader

    async def _partition_names(self, connection: Connection, stream: str) -> list[str]:
        """In order; none if it is not a super stream."""
        return await connection.ask(connection.client.partitions(stream), f"asking for the partitions of {stream}")

    async def _exists(self, connection: Connection, stream: str) -> bool:
        return await connection.ask(connection.client.stream_exists(stream), f"looking for {stream}")

    async def _create_super_stream(self, connection: Connection, spec: StreamSpec) -> None:
        indexes = [str(index) for index in range(spec.partitions)]
        names = [f"{spec.name}-{index}" for index in indexes]
        request = connection.client.create_super_stream(spec.name, names, indexes, _arguments(spec))
        await self._create(connection, request, spec)

    async def _create(self, connection: Connection, request: Coroutine[Any, Any, None], spec: StreamSpec) -> None:
        """Create what may exist; of a plain stream the broker compares the arguments, of a super stream it does not."""
        try:
            await connection.ask(_unless_it_exists(request), f"creating {spec.name}")
        except LogRefused as error:
            if not isinstance(error.__cause__, exceptions.PreconditionFailed):
                raise
            raise LogRefused(
                f"{spec.name} exists with other arguments than {_arguments(spec)}: correct the retention settings, or "
                "drain and delete the stream; the retention of a living stream is changed by a policy of the broker"
            ) from error


class _Alone:
    """The owner of a subscription that nobody shares: after a reconnect it goes on at `position`."""

    def __init__(self, position: int) -> None:
        self.position = position

    async def activate(self, partition: Partition) -> int:  # noqa: ARG002 - of the Protocol
        return self.position

    async def deactivate(self, partition: Partition) -> None:
        """Nothing is in flight."""


async def _records_come(subscription: RabbitSubscription) -> None:
    try:
        await asyncio.wait_for(subscription.ready(), SILENCE_SECONDS)
    except TimeoutError:
        raise LogError(f"{subscription.partition.name}: no records came for {SILENCE_SECONDS:g} s") from None


async def _unless_it_exists(request: Coroutine[Any, Any, None]) -> None:
    with suppress(exceptions.StreamAlreadyExists):
        await request


def _arguments(spec: StreamSpec) -> dict[str, str]:
    """What the broker calls them. It ignores what it does not know, so a slip of the pen would mean no retention."""
    return {
        "max-age": f"{spec.max_age_seconds}s",
        "max-length-bytes": str(spec.max_bytes),
        "stream-max-segment-size-bytes": str(spec.segment_bytes),
    }


def _trust(address: Address, ca_file: Path | None) -> ssl.SSLContext | None:
    if not address.tls:
        if ca_file is not None:
            raise BadSettings("a CA file needs a LOG_URL that begins with rabbitmq-stream+tls://")
        return None
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise BadSettings(f"the CA file {ca_file} cannot be used: {error}") from error
