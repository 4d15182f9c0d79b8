"""Stream `imports` -> super stream `recipients`: one message for each registration that can be mailed.

The split is pure: the same record always gives the same messages under the same publishing ids, so a repeated split is
dropped by the log as a whole.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from models.registration import InvalidRegistration, parse_registration, recipient_body
from models.slices import MAX_ITEMS, InvalidImport, batch_id, cut_items, parse_import
from streams.errors import Reject
from streams.log import route
from streams.message import Message, encoder

STRIDE = MAX_ITEMS
"""Publishing ids per record. A record of more items is refused, else its ids would run into the next record's."""

SPLIT_VERSION = 1
"""Part of the publisher's name. Raise it with ANY change that makes the same record give other messages, or the same
messages on other partitions: validation (also by a new release of email-validator or idna), idempotency key, routing,
number of partitions, STRIDE, body or properties. Otherwise the log drops the new messages under ids it has seen, and
confirms them. In doubt raise it: under a new name everything is published again, and duplicates die on their key; what
was dropped does not come back."""

REDRIVE = "redrive"
"""Property of a slice that redrives a rejected registration: the number of its dead letter."""

ITEMS_PER_STEP = 500
"""So many take 4 ms or so, a time for which everything else of the process may wait."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)
_BATCH_ID = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MAX_INDEX = 2**31 - 1  # the tables count in 32 bits


def publisher_name(source_stream: str, partition: int, epoch: int) -> str:
    """The name to publish under: a replay raises the epoch, so that what it publishes is not dropped as a repeat."""
    return f"splitter/{source_stream}/{partition}/e{epoch}/v{SPLIT_VERSION}"


class Outgoing(NamedTuple):
    """A recipient's message, encoded, and the publishing id that repeats of this record's split give it again."""

    publishing_id: int
    data: bytes


_new_outgoing = partial(tuple.__new__, Outgoing)  # what Outgoing() does, without a call of Python code


class Rejected(NamedTuple):
    """An item that is no registration: place in the whole import, code, sentence without values, original bytes."""

    item_index: int
    reason: str
    error: str
    item: bytes


class Duplicate(NamedTuple):
    """An item whose key an earlier item of the same record has, and its place in the import; it is not published."""

    item_index: int
    key: str


@dataclass(slots=True)
class Split:
    """What one record holds: `items` of them from `first_index` of `total`, each outgoing, rejected or a duplicate.

    `outgoing` has one list for each partition of the target, its publishing ids rising. `redriven_from` is the dead
    letter whose registration this is, once more: it was counted when its slice came.
    """

    batch_id: str
    total: int
    first_index: int
    items: int
    outgoing: list[list[Outgoing]]
    rejected: list[Rejected] = field(default_factory=list)
    duplicates: list[Duplicate] = field(default_factory=list)
    redriven_from: int | None = None

    @property
    def valid(self) -> int:
        """Items that are published: neither rejected nor duplicates."""
        return sum(map(len, self.outgoing))


def split(message: Message, offset: int, partitions: int) -> Split:
    """The record at `offset` in one go; see `split_steps`."""
    *_, whole = split_steps(message, offset, partitions)
    return whole


def split_steps(message: Message, offset: int, partitions: int) -> Iterator[Split]:
    """Split a record step by step: yields the same, growing `Split` once the list is parsed, after every 500 items and
    at the end, when it is complete. Between two steps others may run:

        for result in split_steps(message, record.offset, partitions):
            await asyncio.sleep(0)

    Raises `Reject` at the first step when the record as a whole cannot be taken.
    """
    items = _items(message)
    whole = _empty_split(message, len(items), partitions)
    originals = enumerate(cut_items(message.body))
    encode = encoder("recipient", 1, 1, _trace(message))
    first_id = offset * STRIDE + 1  # not 0: a log answers 0 for the last id of a name that never published
    seen: set[str] = set()
    for number, item in enumerate(items):
        if number % ITEMS_PER_STEP == 0:
            yield whole
        index = whole.first_index + number
        try:
            registration = parse_registration(item)
        except InvalidRegistration as error:
            whole.rejected.append(_rejected(index, error, _original(originals, number)))
            continue
        key = registration.key
        if key in seen:
            whole.duplicates.append(Duplicate(index, key))
            continue
        seen.add(key)
        data = encode(key, recipient_body(registration, whole.batch_id, index))
        whole.outgoing[route(key, partitions)].append(_new_outgoing((first_id + number, data)))
    yield whole


def _items(message: Message) -> list[object]:
    if message.type != "import":
        raise Reject("unknown_type", "the message is not of type import")
    if message.version != 1:
        raise Reject("unknown_version", f"imports of version {message.version} are not known; version 1 is")
    try:
        items = parse_import(message.body)
    except InvalidImport as error:
        raise Reject(error.reason, str(error)) from None
    if len(items) > STRIDE:
        raise Reject("too_many_items", f"{len(items)} items in one message; {STRIDE} are allowed")
    return items


def _empty_split(message: Message, count: int, partitions: int) -> Split:
    batch, total, first = _place(message, count)
    redriven = message.headers.get(REDRIVE)
    redriven_from = redriven if isinstance(redriven, int) and redriven > 0 else None
    return Split(batch, total, first, count, [[] for _ in range(partitions)], redriven_from=redriven_from)


def _place(message: Message, count: int) -> tuple[str, int, int]:
    """Batch id, size of the whole import, index of the first item: as a slice says, else the message is the whole."""
    named = [message.headers.get(name) for name in ("batch", "total", "first")]
    if named == [None, None, None]:
        return batch_id(message.body), count, 0
    batch, total, first = named
    if not (isinstance(batch, str) and _BATCH_ID.fullmatch(batch)):
        raise Reject("bad_slice", "the property batch of a slice must be 64 hexadecimal digits")
    if not (isinstance(total, int) and isinstance(first, int)):
        raise Reject("bad_slice", "the properties total and first of a slice must be integers")
    if not 0 <= first <= first + count <= total <= _MAX_INDEX:
        raise Reject("bad_slice", f"items {first} to {first + count} do not lie within an import of {total}")
    return batch, total, first


def _trace(message: Message) -> dict[str, str | int]:
    """The trace goes on in the recipients' messages, if it is one."""
    trace = message.headers.get("traceparent")
    return {"traceparent": trace} if isinstance(trace, str) and _TRACEPARENT.fullmatch(trace) else {}


def _rejected(index: int, error: InvalidRegistration, item: bytes) -> Rejected:
    reason = "too_large" if error.reason == "too_large" else "invalid_registration"
    return Rejected(index, reason, str(error), item)


def _original(originals: Iterator[tuple[int, bytes]], number: int) -> bytes:
    """The bytes of item `number`; asked for with rising numbers, so borders are searched once, and only if needed."""
    return next(item for at, item in originals if at == number)
