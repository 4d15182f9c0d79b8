"""One member of a group reads at a time: who comes, who goes, who dies, and who does not do what an owner should."""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from streams._rabbitmq_subscription import CREDIT, RabbitSubscription
from streams.log import Partition
from streams.testing import NotingOwner, collect, eventually
from tests.support.rabbit import Rabbit

COUNT = 600

Start = Callable[[str], Awaitable[Process]]


@asynccontextmanager
async def group_of_processes(rabbit: Rabbit, partition: Partition, ledger: Path) -> AsyncIterator[Start]:
    """Starts members by name; those that still live at the end of the block are killed."""
    started: list[Process] = []

    async def start(name: str) -> Process:
        command = ["-m", "tests.support.group_member", rabbit.services.log_url, partition.name, "group"]
        command += [str(ledger), name]
        started.append(await asyncio.create_subprocess_exec(sys.executable, *command, stdout=PIPE))
        return started[-1]

    ledger.touch()  # noqa: ASYNC240 - an empty file
    try:
        yield start
    finally:
        for process in started:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def is_active(process: Process) -> None:
    """Wait until a member says that it has become the reader."""
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 30) == b"active\n"


def lines(ledger: Path, at_least: int) -> list[list[str]]:
    """Name, offset and body of what is done; for `eventually`."""
    found = [line.split() for line in ledger.read_text().splitlines()]
    assert len(found) >= at_least
    return found


async def test_every_record_is_done_once_when_the_active_process_is_killed(rabbit: Rabbit, tmp_path: Path) -> None:
    """kill -9: the broker sees the closed socket and makes the other one active, which begins where the ledger ends."""
    partition = await rabbit.new_partition()
    ledger = tmp_path / "ledger"
    await rabbit.publish(partition, [b"%d" % number for number in range(COUNT)])
    async with group_of_processes(rabbit, partition, ledger) as start:
        first = await start("first")
        await is_active(first)
        second = await start("second")
        await eventually(lambda: lines(ledger, COUNT // 3))

        first.kill()

        await is_active(second)
        done = await eventually(lambda: lines(ledger, COUNT), timeout=60)
    assert [int(offset) for _, offset, _ in done] == list(range(COUNT))
    assert {name for name, _, _ in done} == {"first", "second"}


async def test_every_record_is_done_once_when_the_active_process_is_terminated(rabbit: Rabbit, tmp_path: Path) -> None:
    """SIGTERM without any farewell of ours is the same to the broker."""
    partition = await rabbit.new_partition()
    ledger = tmp_path / "ledger"
    await rabbit.publish(partition, [b"%d" % number for number in range(COUNT)])
    async with group_of_processes(rabbit, partition, ledger) as start:
        members = [await start("0")]
        await is_active(members[0])
        for number in range(1, 3):
            members.append(await start(str(number)))
            await eventually(partial(lines, ledger, COUNT // 4 * number))
            members[number - 1].terminate()
            await is_active(members[number])
        done = await eventually(lambda: lines(ledger, COUNT), timeout=60)
    assert [int(offset) for _, offset, _ in done] == list(range(COUNT))


class Worker(NotingOwner):
    """Does records slowly, and commits each together with the position into a ledger shared by the group."""

    def __init__(self, name: str, ledger: list[tuple[str, int]]) -> None:
        super().__init__()
        self._name = name
        self._ledger = ledger
        self._hands = asyncio.Lock()
        self._work: asyncio.Task[None] | None = None

    async def activate(self, partition: Partition) -> int:
        """Begin behind the last line."""
        async with self._hands:
            await super().activate(partition)
            return self._ledger[-1][1] + 1 if self._ledger else 0

    async def deactivate(self, partition: Partition) -> None:
        """Finish the record in hand."""
        async with self._hands:
            await super().deactivate(partition)

    async def join(self, rabbit: Rabbit, partition: Partition) -> None:
        """Subscribe with a log of its own, and work until the test ends."""
        subscription = await (await rabbit.new_log(direct=True)).subscribe(partition, "group", self)

        async def work() -> None:
            while True:
                await subscription.ready()
                async with self._hands:
                    for record in subscription.take(3) if self.active else []:
                        await asyncio.sleep(0.001)
                        self._ledger.append((self._name, record.offset))
                await asyncio.sleep(0)

        self._work = asyncio.create_task(work())

    def leave(self) -> None:
        """Stop working; the connection is closed with the log."""
        if self._work is not None:
            self._work.cancel()


async def test_no_record_is_read_twice_when_a_second_member_joins(rabbit: Rabbit) -> None:
    """On a super stream the broker takes a partition from a busy member, which commits before it answers."""
    partitions = await rabbit.new_stream(partitions=2)
    ledgers: list[list[tuple[str, int]]] = [[], []]
    for partition in partitions:
        await rabbit.publish(partition, [b"."] * COUNT)

    members: list[Worker] = []

    async def join(name: str) -> None:
        for partition in partitions:
            members.append(Worker(name, ledgers[partition.index]))
            await members[-1].join(rabbit, partition)

    def has_got_on(count: int) -> None:
        assert min(map(len, ledgers)) >= count

    await join("first")
    await eventually(lambda: has_got_on(COUNT // 4))
    await join("second")
    await eventually(lambda: has_got_on(COUNT), timeout=60)
    for member in members:
        member.leave()

    assert [[offset for _, offset in ledger] for ledger in ledgers] == [list(range(COUNT))] * 2
    assert {name for ledger in ledgers for name, _ in ledger} == {"first", "second"}


class HesitatingOwner(NotingOwner):
    """Takes its time to finish."""

    def __init__(self) -> None:
        super().__init__()
        self.may_finish = asyncio.Event()

    async def deactivate(self, partition: Partition) -> None:
        """Note the call and wait."""
        await super().deactivate(partition)
        await self.may_finish.wait()


async def test_nothing_is_handed_out_while_the_owner_finishes(rabbit: Rabbit) -> None:
    """What is buffered belongs to the next member from the moment the broker asks; that one waits for the answer."""
    partitions = await rabbit.new_stream(partitions=2)
    for partition in partitions:
        await rabbit.publish(partition, [b"."] * 10)
    owners = [HesitatingOwner(), HesitatingOwner()]
    log = await rabbit.new_log(direct=True)
    staying = [await log.subscribe(p, "group", owner) for p, owner in zip(partitions, owners, strict=True)]
    for subscription in staying:
        await collect(subscription, 1)
    other = await rabbit.new_log(direct=True)
    coming = [await other.subscribe(partition, "group", NotingOwner(1)) for partition in partitions]

    def asked() -> int:
        assert sum(owner.deactivations for owner in owners) == 1
        return next(index for index, owner in enumerate(owners) if owner.deactivations)

    index = await eventually(asked)
    assert staying[index].take(10) == []
    assert coming[index].take(10) == []
    owners[index].may_finish.set()

    assert len(await collect(coming[index], 9)) == 9
    assert staying[index].take(10) == []
    assert len(staying[1 - index].take(10)) == 9


class RaisingOwner(NotingOwner):
    """Breaks its promise."""

    async def activate(self, partition: Partition) -> int:
        """Note the call and raise."""
        await super().activate(partition)
        raise RuntimeError("the database is away")


async def test_group_moves_on_when_an_owner_raises(rabbit: Rabbit) -> None:
    """Without an answer to the broker the partition would be stuck for everybody; so the connection ends."""
    partition = await rabbit.new_partition()
    await rabbit.publish(partition, [b"one"])
    raising = RaisingOwner()
    await (await rabbit.new_log(direct=True)).subscribe(partition, "group", raising)
    sound = await (await rabbit.new_log(direct=True)).subscribe(partition, "group", NotingOwner())

    assert [record.data for record in await collect(sound, 1)] == [b"one"]
    assert raising.activations >= 1


async def test_connection_survives_when_the_owner_takes_longer_than_the_heartbeat(rabbit: Rabbit) -> None:
    """The owner keeps only itself waiting: heartbeats go both ways meanwhile, and the watchdog stays quiet."""
    partition = await rabbit.new_partition()
    await rabbit.publish(partition, [b"one"])
    owner = NotingOwner()
    owner.may_answer.clear()
    subscription = await (await rabbit.new_log(heartbeat=1)).subscribe(partition, "group", owner)
    asyncio.get_running_loop().call_later(6, owner.may_answer.set)

    assert [record.data for record in await collect(subscription, 1)] == [b"one"]
    assert owner.activations == 1


async def test_answer_is_not_used_when_the_connection_was_lost_meanwhile(rabbit: Rabbit) -> None:
    """The owner answers an old question: it is asked again, and only the new answer counts."""
    partition = await rabbit.new_partition()
    await rabbit.publish(partition, [b"%d" % number for number in range(10)])
    owner = NotingOwner(2)
    owner.may_answer.clear()
    subscription = await (await rabbit.new_log()).subscribe(partition, "group", owner)

    def is_asked(times: int) -> None:
        assert owner.activations == times

    await eventually(lambda: is_asked(1))
    rabbit.proxy.cut()
    await asyncio.sleep(0.05)  # let the reset arrive
    owner.may_answer.set()
    await asyncio.sleep(0)
    owner.position = 7

    records = await collect(subscription, 3)
    await eventually(lambda: is_asked(2))
    assert [record.offset for record in records] == [7, 8, 9]


async def test_delivery_does_not_dry_up_when_a_partition_changes_hands_many_times(rabbit: Rabbit) -> None:
    """Chunks that are dropped because another member takes over owe the broker their credit all the same."""
    partitions = await rabbit.new_stream(partitions=2)
    for partition in partitions:
        for _ in range(30):
            await rabbit.publish(partition, [b"." * 100] * 10)  # many chunks
    owners = [NotingOwner(), NotingOwner()]
    log = await rabbit.new_log(direct=True)
    staying = [await log.subscribe(p, "group", owner) for p, owner in zip(partitions, owners, strict=True)]
    for _ in range(2 * CREDIT):
        for subscription in staying:
            await asyncio.wait_for(subscription.ready(), 20)
        other = await rabbit.new_log(direct=True)
        coming = [await other.subscribe(partition, "group", NotingOwner()) for partition in partitions]
        await whoever_reads(coming)
        await other.close()

    for subscription in staying:
        await collect(subscription, 300)
    assert sum(owner.deactivations for owner in owners) == 2 * CREDIT


async def whoever_reads(members: list[RabbitSubscription]) -> RabbitSubscription:
    """The member that has something to take."""
    waiting = {asyncio.create_task(member.ready()): member for member in members}
    done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=20)
    for task in pending:
        task.cancel()
    return waiting[done.pop()]
