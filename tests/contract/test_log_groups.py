"""Members of a group: one is active on a partition at a time, and the next one takes over from it."""

import asyncio
from typing import Self

from streams.log import Log, Partition, Record, Subscription
from streams.testing import NotingOwner, collect, eventually
from tests.contract.moves import check_equal, data, numbered, publish, read
from tests.contract.places import Place


async def test_groups_read_independently(log: Log, partition: Partition) -> None:
    """Two processors on one stream each see all of it."""
    await publish(log, partition, numbered(10))
    one = await log.subscribe(partition, "one", NotingOwner())
    two = await log.subscribe(partition, "two", NotingOwner())

    assert data(await collect(one, 10)) == numbered(10)
    assert data(await collect(two, 10)) == numbered(10)


async def test_second_member_reads_when_the_first_has_closed(place: Place, log: Log, partition: Partition) -> None:
    """One member of a group is active at a time; the next one begins where the database says."""
    await publish(log, partition, numbered(100))
    first, second = NotingOwner(), NotingOwner()
    active = await log.subscribe(partition, "group", first)
    taken = await collect(active, 40)
    standby = await (await place.second_member(log)).subscribe(partition, "group", second)
    taken += await collect(active, 20)
    assert second.activations == 0
    assert standby.take(10) == []

    second.position = taken[-1].offset + 1
    await active.close()

    taken += await collect(standby, 40)
    assert data(taken) == numbered(100)
    assert second.activations == 1


async def test_owner_is_not_called_after_close(place: Place, log: Log, partition: Partition) -> None:
    """What is closed takes no part in the group any more."""
    first, second = NotingOwner(), NotingOwner()
    active = await log.subscribe(partition, "group", first)
    standby = await (await place.second_member(log)).subscribe(partition, "group", second)
    await eventually(lambda: check_equal(first.active, True))
    await standby.close()

    await active.close()
    await publish(log, partition, numbered(1))
    await read(log, partition, 1)

    assert (second.activations, first.activations, first.deactivations) == (0, 1, 0)


async def test_each_record_is_committed_once_when_members_come_and_go(place: Place, log: Log) -> None:
    """The rule for hand-over: deactivate waits for the work in hand and its commit, then the other one is asked."""
    partitions = await place.new_stream(log, 3)
    ledger: dict[str, list[Record]] = {partition.name: [] for partition in partitions}
    first = [await Member.join(log, partition, ledger) for partition in partitions]
    for partition in partitions:
        await publish(log, partition, numbered(300))
    await eventually(lambda: check_equal([len(lines) >= 50 for lines in ledger.values()], [True] * 3))

    other = await place.second_member(log)
    second = [await Member.join(other, partition, ledger) for partition in partitions]
    for partition in partitions:
        await publish(log, partition, numbered(300, first=300))
    await eventually(lambda: check_equal([len(lines) >= 400 for lines in ledger.values()], [True] * 3))
    for member in first:
        await member.leave()

    await eventually(lambda: check_equal([len(lines) for lines in ledger.values()], [600] * 3))
    for member in second:
        await member.leave()
    assert [data(lines) for lines in ledger.values()] == [numbered(600)] * 3


class Member(NotingOwner):
    """A processor in small: takes a few records, works, commits them together with the position in a ledger."""

    _subscription: Subscription
    _work: asyncio.Task[None]

    def __init__(self, ledger: dict[str, list[Record]]) -> None:
        super().__init__()
        self._ledger = ledger
        self._hands = asyncio.Lock()

    @classmethod
    async def join(cls, log: Log, partition: Partition, ledger: dict[str, list[Record]]) -> Self:
        """Subscribe and begin to work."""
        member = cls(ledger)
        member._subscription = await log.subscribe(partition, "group", member)
        member._work = asyncio.create_task(member._run())
        return member

    async def activate(self, partition: Partition) -> int:
        """Begin behind the last line of the ledger."""
        async with self._hands:
            lines = self._ledger[partition.name]
            self.active = True
            return lines[-1].offset + 1 if lines else 0

    async def deactivate(self, partition: Partition) -> None:
        """Finish the turn in hand."""
        async with self._hands:
            self.active = False

    async def leave(self) -> None:
        """Stop between two turns and leave the group."""
        async with self._hands:
            self._work.cancel()
        await self._subscription.close()

    async def _run(self) -> None:
        while True:
            await self._subscription.ready()
            async with self._hands:
                records = self._subscription.take(7) if self.active else []
                await asyncio.sleep(0.001)  # the work
                self._ledger[self._subscription.partition.name] += records
            await asyncio.sleep(0)
