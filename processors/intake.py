"""The publisher's queue -> the stream of imports. READ `_settle` FIRST: every delivery goes one of its ways.

A list is acked when all its slices are confirmed by the stream. Nothing else happens here: no database, no mail; what
the registrations are worth is the splitter's to say. Not here: connections (`_amqp.py`), names and headers of queues
(`_queues.py`).
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

import structlog

from models.slices import InvalidImport, Slice, batch_id, cut_items, slice_import
from processors import _queues
from processors._amqp import AmqpLost, AmqpMissing, Channel, Connection, Delivery
from processors._management import Management
from processors._publish import Published, publish_slices
from processors._queues import Queues
from streams.errors import StreamsError
from streams.log import Log, Publisher
from streams.telemetry import Metrics, capture_failure

log = structlog.get_logger(__name__)

NAME = "intake"

ATTEMPTS_USED_UP, TOO_LARGE = "attempts_used_up", "too_large"

RECONNECT_SECONDS = (0.5, 30.0)
"""The first and the longest wait before a lost connection is made anew; it doubles in between."""


@dataclass(frozen=True, slots=True)
class Policy:
    """`prefetch` lists are in hand at once. A list that cannot be published is put back after the wait of its try (s),
    at most `retry_limit` times; a body of more than `max_body_bytes` is a dead letter.
    """

    prefetch: int
    retry_waits: tuple[float, ...]
    retry_limit: int
    max_body_bytes: int

    def wait(self, tries: int) -> float | None:
        """How long to wait before the list is put back after so many tries in vain; None: it is a dead letter."""
        if tries >= self.retry_limit:
            return None
        return self.retry_waits[min(tries, len(self.retry_waits) - 1)]


def read_list(body: bytes, limit: int) -> Iterator[Slice]:
    """The slices of a body. Raises InvalidImport: too_large, or the reasons of `models.slices.parse_import`."""
    if len(body) > limit:
        raise InvalidImport(TOO_LARGE, f"the body has {len(body)} bytes, more than AMQP_MAX_BODY_BYTES ({limit})")
    return slice_import(body)


def pick_items(body: bytes, indexes: Iterable[int]) -> Iterator[tuple[int, bytes]]:
    """The bytes of those items of a list, as they came."""
    wanted = set(indexes)
    return ((index, item) for index, item in enumerate(cut_items(body)) if index in wanted) if wanted else iter(())


class Intake:
    """One consumer of the queue; several may run side by side. `connect` opens a connection to its broker."""

    def __init__(
        self,
        queues: Queues,
        policy: Policy,
        connect: Callable[[], Awaitable[Connection]],
        management: Management | None,
        log: Log,
        stream: str,
        metrics: Metrics,
    ) -> None:
        self._queues, self._policy = queues, policy
        self._connect, self._management = connect, management
        self._log, self._stream, self._metrics = log, stream, metrics
        self._publisher: Publisher | None = None
        self._away: str | None = "starting"
        self._delay, self._longest_delay = RECONNECT_SECONDS
        self._unacked: deque[str] = deque(maxlen=policy.prefetch)
        """Lists that are in the stream, but whose ack came too late."""

    def not_ready(self) -> str | None:
        """Why nothing is taken from the queue at the moment."""
        return None if self._away is None else f"the AMQP broker: {self._away}"

    # ---- connections

    async def run(self, stop: asyncio.Event) -> None:
        """Take lists until `stop`, then finish those in hand. Reconnects by itself; raises AmqpRefused, BadSettings."""
        try:
            while not stop.is_set():
                try:
                    await self._consume(stop)
                except (AmqpLost, AmqpMissing) as error:  # a queue may be missing while its node is down
                    self._away = str(error)
                    log.warning("amqp.lost", error=str(error), again_in=self._delay)
                    await _pause(self._delay, stop.wait())
                    self._delay = min(self._delay * 2, self._longest_delay)
                    self._metrics.reconnected("amqp")
        finally:
            await self._drop_publisher()

    async def _consume(self, stop: asyncio.Event) -> None:
        """One connection, from its opening to its end."""
        connection = await self._connect()
        try:
            await _queues.declare(connection, self._queues)
            await self._say_where_dead_letters_go()
            channel = await connection.channel()
            await channel.consume(self._queues.queue, self._policy.prefetch)
            self._away, self._delay = None, RECONNECT_SECONDS[0]
            # None is cancelled when another one fails: a list that is being published is published to its end.
            workers = [self._work(channel, stop) for _ in range(self._policy.prefetch)]
            for result in await asyncio.gather(*workers, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
        finally:
            await connection.close()

    async def _work(self, channel: Channel, stop: asyncio.Event) -> None:
        while (delivery := await _next(channel, stop)) is not None:
            await self._settle(channel, delivery, stop)

    # ---- one delivery

    async def _settle(self, channel: Channel, delivery: Delivery, stop: asyncio.Event) -> None:
        """Publish and ack; or, if that is impossible, lay it to rest; or, if it failed, put it back to be tried again.

        Whatever is raised ends in one of the three. Only when the channel is gone nobody settles it: then the broker
        gives it to somebody again, and what was published twice is found by its keys.
        """
        try:
            await self._take(channel, delivery)
        except AmqpLost:
            raise
        except Exception as error:
            capture_failure(error, processor=NAME)
            await self._give_up(channel, delivery, error, stop)

    async def _give_up(self, channel: Channel, delivery: Delivery, error: Exception, stop: asyncio.Event) -> None:
        try:
            if isinstance(error, InvalidImport):
                await self._lay_to_rest(channel, delivery, error)
            else:
                await self._put_back(channel, delivery, error, stop)
        except AmqpLost:
            raise
        except Exception as second:  # unacked it is safe, and a new connection brings it again
            capture_failure(second, processor=NAME)
            raise AmqpLost(f"a list could be moved nowhere: {type(second).__name__}") from second

    async def _take(self, channel: Channel, delivery: Delivery) -> None:
        slices = read_list(delivery.body, self._policy.max_body_bytes)
        batch = batch_id(delivery.body)
        if not (delivery.redelivered and batch in self._unacked):
            began = time.monotonic()
            done = await self._publish(slices)
            for index, item in pick_items(delivery.body, (index for index, _ in done.oversize)):
                await self._bury_item(channel, delivery, batch, index, item)
            self._unacked.append(batch)
            self._metrics.act_seconds(NAME, time.monotonic() - began)
            log.info("intake.published", batch=batch, items=done.items, records=done.records)
        channel.ack(delivery)
        self._unacked.remove(batch)
        self._metrics.acted(NAME, "sent")
        self._metrics.records(NAME, done=1)

    async def _publish(self, slices: Iterator[Slice]) -> Published:
        """Return when every slice is confirmed. Never cut short by the AMQP side: a late ack is better than none."""
        try:
            if self._publisher is None:
                [partition] = await self._log.partitions(self._stream)
                self._publisher = await self._log.publisher(partition)
            return await publish_slices(self._publisher, slices)
        except BaseException:
            await self._drop_publisher()
            raise

    async def _drop_publisher(self) -> None:
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            await publisher.close()

    # ---- what did not go well

    async def _put_back(self, channel: Channel, delivery: Delivery, error: Exception, stop: asyncio.Event) -> None:
        """At the end of the queue, with its count; a crash right before the ack leaves two of it, as harmless as one.

        When the process stops meanwhile, it stays unacked and goes back as it was.
        """
        said = _said(error)
        tries = _queues.tries(delivery.headers)
        wait = self._policy.wait(tries)
        if wait is None:
            return await self._bury(channel, delivery, ATTEMPTS_USED_UP, said)
        log.warning("intake.not_published", error=said, tries=tries + 1, put_back_in=wait)
        await _pause(wait, stop.wait(), asyncio.shield(channel.lost))
        if channel.lost.done():
            raise channel.lost.result()
        if not stop.is_set():
            await channel.publish("", self._queues.queue, delivery.body, _queues.put_back(delivery))
            channel.ack(delivery)
            self._metrics.acted(NAME, "retry")
        return None

    async def _lay_to_rest(self, channel: Channel, delivery: Delivery, error: InvalidImport) -> None:
        """A body that no try will mend: the broker moves it, if it is known to have a place for it."""
        if not await self._broker_keeps_dead_letters():
            return await self._bury(channel, delivery, error.reason, str(error))
        channel.reject(delivery)
        self._note_death(error.reason, str(error))
        return None

    async def _bury(self, channel: Channel, delivery: Delivery, reason: str, error: str) -> None:
        properties = _queues.dead(delivery, reason, error)
        await channel.publish("", self._queues.dead_queue, delivery.body, properties)
        channel.ack(delivery)
        self._note_death(reason, error)

    def _note_death(self, reason: str, error: str) -> None:
        log.error("intake.dead_letter", reason=reason, error=error, queue=self._queues.dead_queue)
        self._metrics.dead_letter(NAME, reason)
        self._metrics.acted(NAME, "failed")
        self._metrics.records(NAME, done=0, dead=1)

    async def _bury_item(self, channel: Channel, delivery: Delivery, batch: str, index: int, item: bytes) -> None:
        error = f"item {index} has {len(item)} bytes, more than a message may have"
        properties = _queues.dead(delivery, TOO_LARGE, error, batch=batch, index=index)
        await channel.publish("", self._queues.dead_queue, item, properties)
        log.error("intake.item_too_large", batch=batch, index=index, bytes=len(item))
        self._metrics.dead_letter(NAME, TOO_LARGE)

    async def _broker_keeps_dead_letters(self) -> bool:
        """Asked anew for each: a policy may have been set, or lost, since the start."""
        try:
            info = None if self._management is None else await self._management.queue(self._queues.queue)
        except StreamsError as error:
            log.warning("intake.policy_unknown", error=str(error))
            return False
        return info is not None and _queues.dead_letters_in_force(self._queues, info)

    async def _say_where_dead_letters_go(self) -> None:
        kept = await self._broker_keeps_dead_letters()
        how = "by the broker" if kept else "by intake: no dead-letter exchange is known to be in force on the queue"
        log.info("intake.consuming", queue=self._queues.queue, dead_letters=how)


def _said(error: Exception) -> str:
    """Of our own errors the sentence, of others the kind only: they may quote a registration."""
    return str(error) if isinstance(error, StreamsError) else type(error).__name__


async def _next(channel: Channel, stop: asyncio.Event) -> Delivery | None:
    """The next delivery, None when the process is to stop. One that comes with the stop goes back to the queue."""
    taking, stopping = asyncio.ensure_future(channel.next()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({taking, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return None if stop.is_set() else await taking
    finally:
        taking.cancel()
        stopping.cancel()
        await asyncio.wait({taking, stopping})


async def _pause(seconds: float, *ends: Awaitable[object]) -> None:
    """Wait so long, or until one of these ends."""
    tasks = [asyncio.ensure_future(end) for end in ends]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
