"""The moves that the tests of the contract share."""

from streams.log import Log, Partition, Record
from streams.testing import NotingOwner, collect

LIMIT = 15.0
"""Seconds within which what is bounded in time must end."""


def numbered(count: int, first: int = 0) -> list[bytes]:
    """Messages that tell their place in the order of publishing."""
    return [f"message {number}".encode() for number in range(first, first + count)]


def data(records: list[Record]) -> list[bytes]:
    """What was published, without where and when it was stored."""
    return [record.data for record in records]


async def publish(log: Log, partition: Partition, messages: list[bytes]) -> None:
    """Publish without a name through a publisher of its own."""
    publisher = await log.publisher(partition)
    await publisher.publish(messages)
    await publisher.close()


async def read(log: Log, partition: Partition, count: int, position: int = 0, group: str = "readers") -> list[Record]:
    """Subscribe at `position`, collect `count` records, close."""
    subscription = await log.subscribe(partition, group, NotingOwner(position))
    records = await collect(subscription, count)
    await subscription.close()
    return records


async def stored(log: Log, partition: Partition) -> list[bytes]:
    """All that is stored, found by a mark published behind it."""
    await publish(log, partition, [b"the end"])
    subscription = await log.subscribe(partition, "auditors", NotingOwner())
    found: list[bytes] = []
    while not found or found[-1] != b"the end":
        found += data(await collect(subscription, 1))
    await subscription.close()
    return found[:-1]


def check_equal(found: object, wanted: object) -> None:
    """An assertion as a function, for `eventually`."""
    assert found == wanted
