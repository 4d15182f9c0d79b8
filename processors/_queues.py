"""The publisher's exchange and queue, and where its dead letters go: names, declarations, headers of what we put there.

The publisher declares its exchange (direct, durable) and queue (durable, *no arguments*) too, and may come first or
last. A declaration with other arguments would fail on one of the two sides, so the queue gets its dead-letter exchange
by a policy, not by us (docs/decisions/0016). Not here: the connection (`_amqp.py`), and who decides what is dead.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from processors._amqp import AmqpMissing, Channel, Connection, Delivery

RETRY_COUNT = "x-retry-count"
"""How often a message was put back into the queue because the stream was away."""

DELIVERY_COUNT = "x-delivery-count"
"""How often a quorum queue gave a message out in vain; the broker writes it."""

REASON, ERROR, AT = "x-afluente-reason", "x-afluente-error", "x-afluente-at"
BATCH, INDEX = "x-afluente-batch", "x-afluente-index"

_OF_THE_BROKER = {DELIVERY_COUNT, "x-acquired-count"}
_OF_A_DEATH = {REASON, ERROR, AT, BATCH, INDEX}
_DEATHS = ("x-death", "x-first-death-", "x-last-death-")
_ROUTING = {"CC", "BCC"}
"""Headers that would send a copy of what we publish to further queues."""

_OF_DEAD_QUEUE = {"x-queue-type": "quorum", "x-delivery-limit": -1}
"""It is ours alone, so it has arguments: replicated in a cluster, and looked at as often as anybody likes. Without the
limit's end a quorum queue drops what was given out and back 20 times."""

PERSISTENT = 2


@dataclass(frozen=True, slots=True)
class Queues:
    """The names, as the settings have them."""

    exchange: str
    routing_key: str
    queue: str

    @property
    def dead_exchange(self) -> str:
        """The dead-letter exchange."""
        return f"{self.exchange}.dlx"

    @property
    def dead_queue(self) -> str:
        """The dead-letter queue."""
        return f"{self.queue}.dlq"

    @property
    def dead_keys(self) -> tuple[str, ...]:
        """The keys under which the dead-letter exchange passes on to the dead-letter queue.

        Without a key in its policy a message keeps that of its publishing, which is the queue's name once it was put
        back.
        """
        return (self.dead_queue, self.routing_key, self.queue)


async def declare(connection: Connection, queues: Queues) -> None:
    """Make what is missing of exchange, queue, dead-letter exchange and queue, and bind them; what exists stays as is.

    A queue with other arguments (such as a quorum queue) is as good; `afluente topology check` speaks of it. Raises
    AmqpLost and AmqpRefused.
    """
    for exchange in (queues.exchange, queues.dead_exchange):
        if not await exchange_exists(connection, exchange):
            await declare_exchange(connection, exchange)
    for queue in (queues.queue, queues.dead_queue):
        if not await queue_exists(connection, queue):
            await declare_queue(connection, queues, queue)
    channel = await connection.channel()
    await channel.bind(queues.exchange, queues.queue, queues.routing_key)
    for key in queues.dead_keys:
        await channel.bind(queues.dead_exchange, queues.dead_queue, key)
    await channel.close()


async def exchange_exists(connection: Connection, name: str) -> bool:
    """Whether there is an exchange of this name, whatever its kind."""
    return await _exists(connection, lambda channel: channel.declare_exchange(name, passive=True))


async def queue_exists(connection: Connection, name: str) -> bool:
    """Whether there is a queue of this name, whatever its kind."""
    return await _exists(connection, lambda channel: channel.declare_queue(name, passive=True))


async def declare_exchange(connection: Connection, name: str) -> None:
    """Declare it as the publisher does. Raises AmqpRefused, with the broker's reason, when it exists otherwise."""
    await _alone(connection, lambda channel: channel.declare_exchange(name))


async def declare_queue(connection: Connection, queues: Queues, name: str) -> None:
    """Declare the publisher's queue as it does, or the dead-letter queue as ours; raises as above."""
    arguments = _OF_DEAD_QUEUE if name == queues.dead_queue else None
    await _alone(connection, lambda channel: channel.declare_queue(name, arguments=arguments))


async def _exists(connection: Connection, look: Callable[[Channel], Awaitable[object]]) -> bool:
    with suppress(AmqpMissing):
        await _alone(connection, look)
        return True
    return False


async def _alone(connection: Connection, work: Callable[[Channel], Awaitable[object]]) -> None:
    """On a channel of its own, for a refusal ends it."""
    channel = await connection.channel()
    await work(channel)
    await channel.close()


# ---- headers


def tries(headers: Mapping[str, Any]) -> int:
    """How often a message was tried in vain: put back by us, or given out again by a quorum queue."""
    return sum(_count(headers.get(name)) for name in (RETRY_COUNT, DELIVERY_COUNT))


def _count(value: object) -> int:
    return max(0, value) if isinstance(value, int) else 0


def put_back(delivery: Delivery) -> dict[str, Any]:
    """The properties of a message that is put back to be tried once more: its own, and the count of tries."""
    return _properties(delivery, {RETRY_COUNT: tries(delivery.headers) + 1}, drop=set())


def dead(delivery: Delivery, reason: str, error: str, **of_item: str | int) -> dict[str, Any]:
    """The properties of a dead letter: the message's own, the reason (a code) and the error (a sentence).

    `of_item`, for a single item: `batch` and `index`. No time to live: it would let the letter vanish.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    added = {REASON: reason, ERROR: error, AT: now} | {f"x-afluente-{name}": value for name, value in of_item.items()}
    return {n: v for n, v in _properties(delivery, added, drop=set()).items() if n != "expiration"}


def fresh(delivery: Delivery) -> dict[str, Any]:
    """The properties of a dead letter that gets another chance: those that it had before it died, no count of tries."""
    return _properties(delivery, {}, drop={RETRY_COUNT, *_OF_A_DEATH, *filter(_tells_of_death, delivery.headers)})


def _properties(delivery: Delivery, added: dict[str, Any], drop: set[str]) -> dict[str, Any]:
    dropped = drop | _OF_THE_BROKER | _ROUTING
    headers = {name: value for name, value in delivery.headers.items() if name not in dropped}
    # The broker refuses a message whose user_id is not ours.
    kept = {name: value for name, value in delivery.properties.items() if name != "user_id"}
    return kept | {"headers": headers | added, "delivery_mode": PERSISTENT}


def _tells_of_death(header: object) -> bool:
    return isinstance(header, str) and header.startswith(_DEATHS)  # of a client without UTF-8 it is bytes


# ---- what the management interface says of the queue


def dead_lettering(info: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The dead-letter exchange and routing key in force; the queue's own arguments stand above any policy."""
    arguments, policy = info.get("arguments") or {}, info.get("policy_definition") or {}
    exchange = arguments.get("x-dead-letter-exchange", policy.get("dead-letter-exchange"))
    key = arguments.get("x-dead-letter-routing-key", policy.get("dead-letter-routing-key"))
    return exchange, key


def dead_letters_in_force(queues: Queues, info: Mapping[str, Any]) -> bool:
    """Whether what is rejected is certain to get into the dead-letter queue.

    Without a key of its own a dead letter keeps that under which it came, and somebody may have published it under any.
    """
    exchange, key = dead_lettering(info)
    return exchange == queues.dead_exchange and key in queues.dead_keys
