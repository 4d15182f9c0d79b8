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
    published = 0
    enough = asyncio.Event()

    async def read() -> None:
        while True:
            await subscription.ready()
            done.extend(subscription.take(100))
            owner.position = done[-1].offset + 1 if done else 0

    async def publish() -> None:
        nonlocal published
        while not enough.is_set():
            numbers = range(published, published + 50)
            await publisher.publish([b"%d" % number for number in numbers], numbers)
            published += 50
            await asyncio.sleep(0.01)

    def are_done(count: int) -> None:
        assert len(done) >= count

    reading = asyncio.create_task(read())
    publishing = asyncio.create_task(publish())
    await eventually(lambda: are_done(500))
    await asyncio.to_thread(rabbit.services.do, how)
    if how == "kill-broker":
        await asyncio.to_thread(rabbit.services.do, "start-broker")
    before = published
    await eventually(lambda: are_done(before + 500), timeout=60)
    enough.set()
    await asyncio.wait_for(publishing, 60)
    await eventually(lambda: are_done(published), timeout=60)
    reading.cancel()

    assert [record.data for record in done] == [b"%d" % number for number in range(published)]
    assert owner.activations >= 2
    assert log.connected
