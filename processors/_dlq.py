"""The AMQP dead-letter queue: look at what lies in it, and give back to the publisher's queue what can be read now.

Looking takes nothing away: a letter that is not acked goes back to its place when the channel closes. Not here: the
dead letters of rows and records, which live in the database.
"""

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from models.slices import InvalidImport
from processors import _queues
from processors._amqp import Channel, Delivery
from processors._queues import Queues
from processors.intake import read_list

SINGLE_ITEM = "single_item"
"""Why an item that was too large cannot be given back: it is no list."""


@dataclass(frozen=True, slots=True)
class Letter:
    """What is known of a dead letter without quoting it; `number` counts from 1, the oldest."""

    number: int
    reason: str
    error: str
    size: int
    died_at: str
    batch: str = ""
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Requeued:
    """How many letters were given back, or would be; and how many were left where they are, by reason."""

    given_back: int = 0
    left: Counter[str] = field(default_factory=Counter)


async def deliveries(channel: Channel, queue: str, limit: int | None = None) -> AsyncIterator[tuple[int, Delivery]]:
    """The letters that lie in the queue now, the oldest first, numbered from 1."""
    count = await channel.declare_queue(queue, passive=True)
    for number in range(1, min(count, count if limit is None else limit) + 1):
        delivery = await channel.get(queue)
        if delivery is None:
            return
        yield number, delivery


def describe(number: int, delivery: Delivery, max_body_bytes: int) -> Letter:
    """A letter that intake buried says why; of one that the broker moved, the body is read anew to know."""
    headers = delivery.headers
    death = _last_death(headers)
    reason, error = headers.get(_queues.REASON), headers.get(_queues.ERROR)
    if reason is None:
        reason, error = why_unreadable(delivery, max_body_bytes) or (death.get("reason", ""), "")
    return Letter(
        number,
        str(reason),
        str(error or ""),
        len(delivery.body),
        str(headers.get(_queues.AT) or death.get("time") or ""),
        str(headers.get(_queues.BATCH, "")),
        headers.get(_queues.INDEX),
    )


def why_unreadable(delivery: Delivery, max_body_bytes: int) -> tuple[str, str] | None:
    """Reason and error if intake could not take this body; None if it could."""
    if _queues.INDEX in delivery.headers:
        return SINGLE_ITEM, "it is an item, not a list: make it smaller and publish it in a list"
    try:
        read_list(delivery.body, max_body_bytes)
    except InvalidImport as error:
        return error.reason, str(error)
    return None


async def requeue(
    channel: Channel,
    queues: Queues,
    max_body_bytes: int,
    *,
    limit: int | None = None,
    reason: str | None = None,
    dry_run: bool = False,
) -> Requeued:
    """Publish to the publisher's queue with confirm, then ack here; what intake could not take stays, and is counted.

    At most `limit` are given back, only those of this `reason`. May be interrupted at any letter: one that is in both
    queues then is a list that comes twice, which mails nobody twice. Raises Unroutable when the queue is gone.
    """
    done, left = 0, Counter[str]()
    async for number, delivery in deliveries(channel, queues.dead_queue):
        letter = describe(number, delivery, max_body_bytes)
        if reason is not None and letter.reason != reason:
            continue
        if (problem := why_unreadable(delivery, max_body_bytes)) is not None:
            left[problem[0]] += 1
            continue
        if not dry_run:
            await channel.publish("", queues.queue, delivery.body, _queues.fresh(delivery))
            channel.ack(delivery)
        done += 1
        if done == limit:
            break
    return Requeued(done, left)


def _last_death(headers: Any) -> dict[str, Any]:
    deaths = headers.get("x-death") or [{}]
    return deaths[0] if isinstance(deaths[0], dict) else {}
