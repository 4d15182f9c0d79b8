"""The broker goes away and comes back in the middle of the work (O-20, O-21)."""

import asyncio

import pytest

from streams.log import Record
from streams.testing import NotingOwner, eventually
from tests.support.rabbit import Rabbit


@pytest.mark.parametrize("how", ["restart-broker", "kill-broker"])
@pytest.mark.timeout(240)
async def test_everything_is_published_and_read_once_when_the_broker_restarts(rabbit: Rabbit, how: str) -> None:
    """Publisher and consumer come back by themselves; nothing confirmed is lost, nothing is stored or read twice."""
    partition = await rabbit.new_partition()
    log = await rabbit.new_log(direct=True)
    publisher = await log.publisher(partition, "pump")
    owner = NotingOwner()
    subscription = await log.subscribe(partition, "readers", owner)
    done: list[Record] = []

    async def read() -> None:
        while True:
            await subscription.ready()
            done.extend(subscription.take(100))
            owner.position = done[-1].offset + 1 if done else 0

    async def publish(first: int, end: int) -> None:
        for start in range(first, end, 50):
            await publisher.publish([b"%d" % number for number in range(start, start + 50)], range(start, start + 50))
            await asyncio.sleep(0.01)

    def are_done(count: int) -> None:
        assert len(done) >= count

    reading = asyncio.create_task(read())
    publishing = asyncio.create_task(publish(0, 20_000))
    await eventually(lambda: are_done(500))
    await asyncio.to_thread(rabbit.services.do, how)
    if how == "kill-broker":
        await asyncio.to_thread(rabbit.services.do, "start-broker")
    await asyncio.wait_for(publishing, 90)
    await eventually(lambda: are_done(20_000), timeout=60)
    reading.cancel()

    assert [record.data for record in done] == [b"%d" % number for number in range(20_000)]
    assert owner.activations >= 2
    assert log.connected
