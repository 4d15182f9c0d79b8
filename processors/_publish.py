"""A list of registrations, from a file or a queue, into the stream of imports: cut into slices, each confirmed.

It changes nothing in the list; whether each registration can be mailed is the splitter's to say.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from models.slices import Slice, slice_import
from streams.log import Log, Publisher, StreamSpec
from streams.message import Message


@dataclass(frozen=True, slots=True)
class Published:
    """What was written: the batch, how many registrations, in how many records.

    `oversize`: (index, bytes) of items that are too large for a message; the splitter will reject each.
    """

    batch_id: str
    items: int
    records: int
    oversize: tuple[tuple[int, int], ...]


async def publish(
    log: Log, spec: StreamSpec, body: bytes, progress: Callable[[int, int], object] = lambda *_: None
) -> Published:
    """Write the import `body` (a JSON array in UTF-8) to the stream, slice after slice.

    `progress` is told how many items of how many are confirmed so far. Raises InvalidImport before anything is written.
    Unconfirmed and other LogErrors come in the middle: what was written stays; all of it published again mails nobody
    twice.
    """
    slices = slice_import(body)
    await log.declare(spec)
    [partition] = await log.partitions(spec.name)
    publisher = await log.publisher(partition)
    try:
        return await publish_slices(publisher, slices, progress)
    finally:
        await publisher.close()


async def publish_slices(
    publisher: Publisher, slices: Iterable[Slice], progress: Callable[[int, int], object] = lambda *_: None
) -> Published:
    """Write the slices of one import, each confirmed before the next; the rest as `publish`."""
    items, records, batch = 0, 0, ""
    oversize: list[tuple[int, int]] = []
    for one in slices:
        await publisher.publish([_message(one).encode()])
        items, records, batch = items + one.items, records + 1, one.batch
        oversize += one.oversize
        progress(items, one.total)
    return Published(batch, items, records, tuple(oversize))


def _message(one: Slice) -> Message:
    return Message(f"{one.batch}/{one.first}", "import", 1, 1, one.body, one.headers())
