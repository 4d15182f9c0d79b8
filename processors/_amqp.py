"""AMQP 0-9-1 as intake and the commands about its queues need it. With its private neighbours all that knows pika.

    _amqp_errors     pika's errors in our words
    _amqp_headers    headers of any client, whole

It runs on pika's asyncio adapter, so heartbeats are answered whenever the loop turns: also while a list is published to
a stream, and while a retry waits. Messages are plain data here. Not here: names of queues (`_queues.py`) and decisions.
"""

import asyncio
import functools
import logging
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from processors._amqp_errors import (
    AmqpLost,
    AmqpMissing,
    AmqpRefused,
    Unroutable,
    connection_errors,
    loss,
    lost_on_error,
    refusal,
)
from streams.errors import BadSettings

if TYPE_CHECKING:
    from pika.adapters.asyncio_connection import AsyncioConnection

__all__ = ["AmqpLost", "AmqpMissing", "AmqpRefused", "Channel", "Connection", "Delivery", "Unroutable", "vhost"]

HEARTBEAT_SECONDS = 20
"""Proposed where the URL has no `?heartbeat=`; a broker that is silent for little longer counts as gone."""

ANSWER_SECONDS = 30.0
"""How long an answer may take: a broker that stops its publishers (an alarm of memory or disk) answers nothing."""

CLOSE_SECONDS = 3.0

_PROPERTIES = (
    "content_type", "content_encoding", "headers", "delivery_mode", "priority", "correlation_id", "reply_to",
    "expiration", "message_id", "timestamp", "type", "user_id", "app_id", "cluster_id",
)  # fmt: skip

# Every failure is raised and told in our words; pika would log each of them several times, at ERROR.
logging.getLogger("pika").setLevel(logging.CRITICAL)


@functools.cache
def _pika() -> Any:
    """pika with our reading of headers; loaded by the first who connects: 2 MB that no other process needs."""
    import pika  # noqa: PLC0415
    import pika.adapters.asyncio_connection  # noqa: PLC0415

    from processors import _amqp_headers  # noqa: PLC0415

    _amqp_headers.install()
    return pika


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message as it was delivered. `properties` holds those that it has, under AMQP's names (headers: a dict)."""

    tag: int
    body: bytes
    properties: Mapping[str, Any]
    exchange: str = ""
    routing_key: str = ""
    redelivered: bool = False

    @property
    def headers(self) -> Mapping[str, Any]:
        """Its headers, empty if it has none."""
        return self.properties.get("headers") or {}


class Connection:
    """One connection to the broker, see `open`."""

    def __init__(self, connection: "AsyncioConnection", closed: "asyncio.Future[BaseException]") -> None:
        self._connection, self._closed = connection, closed

    @classmethod
    async def open(cls, url: str, label: str, ca_file: Path | None = None) -> Self:
        """Connect to `amqp[s]://user:password@host:port/vhost`; `label` names the connection in the management.

        `ca_file` replaces the system's certificates, with TLS only. pika's own options may follow the URL, such as
        `?heartbeat=5`. Raises BadSettings, AmqpLost and AmqpRefused; none of their texts holds the password.
        """
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = loop.create_future()
        closed: asyncio.Future[BaseException] = loop.create_future()
        pika = _pika()
        connection = pika.adapters.asyncio_connection.AsyncioConnection(
            _parameters(url, label, ca_file),
            on_open_callback=lambda _: _resolve(opened, None),
            on_open_error_callback=lambda _, error: _resolve(opened, error=error),
            on_close_callback=lambda _, error: _resolve(closed, error),
        )
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await opened
        except connection_errors() as error:
            raise refusal(error) from error
        except asyncio.CancelledError:
            _abandon(connection)
            raise
        return cls(connection, closed)

    async def channel(self) -> "Channel":
        """A new channel that confirms what is published on it."""
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = loop.create_future()
        with lost_on_error():
            channel = Channel(self._connection.channel(on_open_callback=lambda _: _resolve(opened, None)))
        await channel.open(opened)
        return channel

    async def close(self) -> None:
        """Close in good order; unacked messages go back to their queues. Bounded in time."""
        _abandon(self._connection)
        await asyncio.wait({self._closed}, timeout=CLOSE_SECONDS)


class Channel:
    """One channel; every method but `next` may be used by several tasks. It ends with its first error."""

    def __init__(self, channel: Any) -> None:
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[AmqpLost] = loop.create_future()
        """Done as soon as the channel is gone: its result says why."""
        self._channel = channel
        self._deliveries: asyncio.Queue[Delivery] = asyncio.Queue()
        self._publishing = asyncio.Lock()
        self._confirm: asyncio.Future[None] = loop.create_future()
        self._getting: asyncio.Future[Delivery | None] | None = None
        channel.add_on_close_callback(lambda _, reason: self._end(reason))

    async def open(self, opened: "asyncio.Future[None]") -> None:
        """The second half of `Connection.channel`."""
        await self._answer(opened)
        self._channel.add_on_return_callback(self._returned)
        self._channel.add_on_cancel_callback(lambda _: self._end(AmqpLost("the queue was deleted or has moved")))
        self._channel.add_callback(lambda _: self._got(None), [_pika().spec.Basic.GetEmpty], one_shot=False)
        await self._ask(lambda done: self._channel.confirm_delivery(self._confirmed, callback=done))

    async def close(self) -> None:
        """Give the channel up; what is unacked on it goes back."""
        with lost_on_error():
            self._channel.close()
        await asyncio.wait({self.lost}, timeout=CLOSE_SECONDS)

    # ---- declaring

    async def declare_exchange(self, name: str, *, passive: bool = False) -> None:
        """A durable direct exchange; `passive`: only look whether there is one of this name, whatever its kind."""
        await self._ask(
            lambda done: self._channel.exchange_declare(name, "direct", passive=passive, durable=True, callback=done)
        )

    async def declare_queue(
        self, name: str, *, passive: bool = False, arguments: Mapping[str, object] | None = None
    ) -> int:
        """A durable queue; answers how many messages are ready. `passive` as above."""
        answer = await self._ask(
            lambda done: self._channel.queue_declare(
                name, passive=passive, durable=True, arguments=dict(arguments or {}), callback=done
            )
        )
        return int(answer.method.message_count)

    async def bind(self, exchange: str, queue: str, routing_key: str) -> None:
        """What is published to the exchange with this key goes to the queue."""
        await self._ask(lambda done: self._channel.queue_bind(queue, exchange, routing_key, callback=done))

    # ---- receiving

    async def consume(self, queue: str, prefetch: int) -> None:
        """Have at most `prefetch` unacked messages of the queue delivered, for `next`."""
        await self._ask(lambda done: self._channel.basic_qos(prefetch_count=prefetch, callback=done))
        await self._ask(lambda done: self._channel.basic_consume(queue, self._delivered, callback=done))

    async def next(self) -> Delivery:
        """The next delivery, as soon as there is one. Raises AmqpLost. Cancel-safe."""
        taking = asyncio.ensure_future(self._deliveries.get())
        first: set[asyncio.Future[Any]] = {taking, self.lost}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if self.lost.done():  # what was delivered before is nobody's any more
                raise self.lost.result()
            return taking.result()
        finally:
            taking.cancel()

    async def get(self, queue: str) -> Delivery | None:
        """Take one message, None if none is ready. It is unacked until `ack`, `reject`, or the end of the channel."""
        self._getting = asyncio.get_running_loop().create_future()
        with lost_on_error():
            self._channel.basic_get(queue, self._got_one)
        delivery: Delivery | None = await self._answer(self._getting)
        return delivery

    def ack(self, delivery: Delivery) -> None:
        """It is done. Raises AmqpLost."""
        with lost_on_error():
            self._channel.basic_ack(delivery.tag)

    def reject(self, delivery: Delivery) -> None:
        """Never deliver it again: the broker moves it to the dead-letter exchange in force, else drops it."""
        with lost_on_error():
            self._channel.basic_nack(delivery.tag, requeue=False)

    # ---- publishing

    async def publish(self, exchange: str, routing_key: str, body: bytes, properties: Mapping[str, Any]) -> None:
        """Return when a queue has it and the broker confirms that. Raises Unroutable and AmqpLost."""
        async with self._publishing:  # one at a time, so that what comes back is known to be this one
            self._confirm = asyncio.get_running_loop().create_future()
            with lost_on_error():
                self._channel.basic_publish(
                    exchange, routing_key, body, _pika().BasicProperties(**properties), mandatory=True
                )
            await self._answer(self._confirm, judge=loss)

    # ---- what pika calls: nothing here waits or raises

    def _end(self, reason: BaseException) -> None:
        _resolve(self.lost, reason if isinstance(reason, AmqpLost) else loss(reason))

    def _delivered(self, _: Any, method: Any, properties: Any, body: bytes) -> None:
        self._deliveries.put_nowait(_delivery(method, properties, body))

    def _got_one(self, _: Any, method: Any, properties: Any, body: bytes) -> None:
        self._got(_delivery(method, properties, body))

    def _got(self, delivery: Delivery | None) -> None:
        if self._getting is not None:
            _resolve(self._getting, delivery)

    def _returned(self, _: Any, method: Any, _properties: Any, _body: bytes) -> None:
        _resolve(self._confirm, error=Unroutable(f"no queue takes it: {method.reply_text}"))

    def _confirmed(self, frame: Any) -> None:
        refused = isinstance(frame.method, _pika().spec.Basic.Nack)
        _resolve(self._confirm, None, error=AmqpLost("the broker could not store it") if refused else None)

    # ---- waiting

    async def _ask(self, call: Callable[[Callable[[Any], None]], object]) -> Any:
        """Send a request and wait for its answer. Raises also AmqpRefused and AmqpMissing."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with lost_on_error():
            call(lambda frame: _resolve(answer, frame))
        return await self._answer(answer)

    async def _answer(
        self, answer: "asyncio.Future[Any]", judge: Callable[[BaseException], BaseException] | None = None
    ) -> Any:
        """The answer; or why there is none, where a request's own failure may be the reason (`refusal`) or not."""
        await asyncio.wait({answer, self.lost}, timeout=ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        if self.lost.done():
            lost = self.lost.result()
            raise (judge or refusal)(lost.__cause__ or lost)
        raise AmqpLost(f"no answer for {ANSWER_SECONDS:g} s")


def _delivery(method: Any, properties: Any, body: bytes) -> Delivery:
    given = {name: value for name in _PROPERTIES if (value := getattr(properties, name)) is not None}
    return Delivery(method.delivery_tag, body, given, method.exchange, method.routing_key, method.redelivered)


def _resolve(future: "asyncio.Future[Any]", result: Any = None, error: BaseException | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _abandon(connection: "AsyncioConnection") -> None:
    with suppress(_pika().exceptions.ConnectionWrongStateError):
        connection.close()


# ---- parameters


def vhost(url: str) -> str:
    """The vhost of an AMQP URL. Raises BadSettings."""
    return str(_parameters(url, "", None).virtual_host)


def _parameters(url: str, label: str, ca_file: Path | None) -> Any:
    pika = _pika()
    try:
        parameters = pika.URLParameters(url)
        if ca_file is not None and parameters.ssl_options is not None:
            parameters.ssl_options = pika.SSLOptions(ssl.create_default_context(cafile=ca_file), parameters.host)
    except Exception:  # whatever it is, its text may hold a piece of the password
        raise BadSettings("AMQP_URL must look like amqp[s]://user:password@host:5672/vhost, %-encoded") from None
    parameters.client_properties = {"connection_name": label}
    if parameters.heartbeat is None:
        parameters.heartbeat = HEARTBEAT_SECONDS
    return parameters
