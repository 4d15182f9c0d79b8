"""Publishing when the connection does not last: what is confirmed is stored, under a name exactly once and in order."""

import asyncio
import random

import pytest

from streams.errors import StreamMissing, Unconfirmed
from streams.log import Partition, Publisher
from streams.testing import eventually
from tests.support.broker import new_name
from tests.support.rabbit import Rabbit

SOAK_SECONDS = 12.0


class Pump:
    """Publishes numbered messages in small calls, each number as id and as body, until it is stopped."""

    def __init__(self, publisher: Publisher, batch: int = 50) -> None:
        self.confirmed = 0
        self._publisher = publisher
        self._batch = batch
        self._stopping = False
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> list[bytes]:
        """End after the call in hand. Returns everything that was confirmed."""
        self._stopping = True
        await asyncio.wait_for(self._task, 60)
        return [b"%d" % number for number in range(self.confirmed)]

    async def _run(self) -> None:
        while not self._stopping:
            numbers = range(self.confirmed, self.confirmed + self._batch)
            await self._publisher.publish([b"%d" % number for number in numbers], numbers)
            self.confirmed = numbers.stop


async def more_confirmed(pump: Pump) -> None:
    """Wait until the pump has got on, so that a disturbance meets it at work."""
    at_least = pump.confirmed + 200

    def has_got_on() -> None:
        assert pump.confirmed >= at_least

    await eventually(has_got_on, timeout=60)


async def pump_through_proxy(rabbit: Rabbit, partition: Partition) -> Pump:
    """A pump whose publisher has a name and goes through the proxy."""
    return Pump(await (await rabbit.new_log()).publisher(partition, "pump"))


async def test_everything_is_stored_once_in_order_when_connections_are_cut_at_random(rabbit: Rabbit) -> None:
    """The recipe: stop, ask for the highest stored id, resend the rest in order, only then go on."""
    partition = await rabbit.new_partition()
    pump = await pump_through_proxy(rabbit, partition)
    chance = random.Random(20)
    end = asyncio.get_running_loop().time() + SOAK_SECONDS
    cuts = 0
    while asyncio.get_running_loop().time() < end:
        await more_confirmed(pump)
        way = chance.choice(["cut", "cut", "fin", "freeze both", "freeze up", "freeze down"])
        if way.startswith("freeze"):
            rabbit.proxy.freeze(up=way != "freeze down", down=way != "freeze up")
            await asyncio.sleep(chance.uniform(0, 0.3))
        if way == "fin":
            rabbit.proxy.fin()
        else:
            rabbit.proxy.cut()
        cuts += 1

    confirmed = await pump.stop()

    assert await rabbit.stored(partition) == confirmed
    assert cuts >= 5


async def test_nothing_is_doubled_when_the_confirms_are_lost_with_the_connection(rabbit: Rabbit) -> None:
    """The messages reach the broker, the answers do not reach us: a blind resend would double them."""
    partition = await rabbit.new_partition()
    pump = await pump_through_proxy(rabbit, partition)
    for _ in range(3):
        await more_confirmed(pump)
        before = (await rabbit.spared.bounds(partition)).next
        rabbit.proxy.freeze(up=False)

        async def is_stored_unheard(before: int = before) -> None:
            assert (await rabbit.spared.bounds(partition)).next > max(before, pump.confirmed)

        await eventually(is_stored_unheard)
        rabbit.proxy.cut()

    confirmed = await pump.stop()

    assert await rabbit.stored(partition) == confirmed


async def test_nothing_is_lost_when_messages_are_lost_with_the_connection(rabbit: Rabbit) -> None:
    """The messages never reach the broker: they must be sent again, before any newer one."""
    partition = await rabbit.new_partition()
    pump = await pump_through_proxy(rabbit, partition)
    for _ in range(3):
        await more_confirmed(pump)
        rabbit.proxy.freeze(down=False)
        await asyncio.sleep(0.1)
        rabbit.proxy.cut()

    confirmed = await pump.stop()

    assert await rabbit.stored(partition) == confirmed


async def test_everything_is_stored_once_when_confirms_are_swallowed(rabbit: Rabbit) -> None:
    """A connection that stays open and silent tells nobody anything: only our own time-out ends the wait."""
    partition = await rabbit.new_partition()
    log = await rabbit.new_log(heartbeat=60, confirm_timeout=1.0)
    publisher = await log.publisher(partition, "pump")
    await publisher.publish([b"one"], [1])
    rabbit.proxy.freeze(up=False)

    await asyncio.wait_for(publisher.publish([b"two", b"three"], [2, 3]), 20)

    assert await rabbit.stored(partition) == [b"one", b"two", b"three"]


async def test_publisher_moves_on_when_its_connection_is_half_open(rabbit: Rabbit) -> None:
    """The watchdog gives the silent connection up, long before the time-out of confirms."""
    partition = await rabbit.new_partition()
    log = await rabbit.new_log(heartbeat=1, confirm_timeout=600)
    publisher = await log.publisher(partition, "pump")
    await publisher.publish([b"one"], [1])
    rabbit.proxy.freeze()

    await asyncio.wait_for(publisher.publish([b"two"], [2]), 30)

    assert await rabbit.stored(partition) == [b"one", b"two"]


async def test_everything_is_stored_once_when_the_broker_closes_the_connection(rabbit: Rabbit) -> None:
    """An operator presses "Force close", in the middle of the work."""
    partition = await rabbit.new_partition()
    label = new_name()
    log = await rabbit.new_log(label=label)
    pump = Pump(await log.publisher(partition, "pump"))
    await more_confirmed(pump)

    async def is_closed() -> None:
        assert await rabbit.management.close_connections(f"{label} publish") == 1

    await eventually(is_closed)  # the list of connections is some seconds behind
    await more_confirmed(pump)
    confirmed = await pump.stop()

    assert await rabbit.stored(partition) == confirmed


async def test_publisher_waits_when_the_broker_cannot_be_reached(rabbit: Rabbit) -> None:
    """It tries again for as long as it takes, and the log says so meanwhile."""
    partition = await rabbit.new_partition()
    log = await rabbit.new_log()
    publisher = await log.publisher(partition, "pump")
    rabbit.proxy.refusing = True
    rabbit.proxy.cut()
    publishing = asyncio.create_task(publisher.publish([b"one"], [1]))

    def is_known() -> None:
        assert not log.connected

    await eventually(is_known)
    assert not publishing.done()
    rabbit.proxy.refusing = False

    await asyncio.wait_for(publishing, 30)
    assert log.connected
    assert await rabbit.stored(partition) == [b"one"]


async def test_unconfirmed_is_raised_when_a_publisher_without_name_loses_its_connection(rabbit: Rabbit) -> None:
    """Without a name nobody can know what is stored, so nothing is resent; the next call has a new connection."""
    partition = await rabbit.new_partition()
    publisher = await (await rabbit.new_log()).publisher(partition)
    rabbit.proxy.freeze(up=False)
    publishing = asyncio.create_task(publisher.publish([b"one", b"two"]))

    async def is_stored() -> None:
        assert (await rabbit.spared.bounds(partition)).next == 2

    await eventually(is_stored)
    rabbit.proxy.cut()

    with pytest.raises(Unconfirmed, match="2 of 2"):
        await asyncio.wait_for(publishing, 20)
    await publisher.publish([b"three"])
    assert await rabbit.stored(partition) == [b"one", b"two", b"three"]


async def test_publisher_without_name_works_when_its_connection_was_lost_between_calls(rabbit: Rabbit) -> None:
    """Nothing was under way, so nothing is in doubt."""
    partition = await rabbit.new_partition()
    publisher = await (await rabbit.new_log()).publisher(partition)
    await publisher.publish([b"one"])
    rabbit.proxy.cut()
    await asyncio.sleep(0.05)  # let the reset arrive

    await publisher.publish([b"two"])

    assert await rabbit.stored(partition) == [b"one", b"two"]


async def test_next_call_is_complete_when_a_call_was_cancelled(rabbit: Rabbit) -> None:
    """A confirm that comes late for an abandoned call is not taken for one of the next."""
    partition = await rabbit.new_partition()
    publisher = await (await rabbit.new_log()).publisher(partition, "pump")
    rabbit.proxy.freeze(down=False)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(publisher.publish([b"one", b"two"], [1, 2]), 0.2)
    rabbit.proxy.thaw()

    await publisher.publish([b"two", b"three"], [2, 3])

    assert (await rabbit.stored(partition))[-2:] == [b"two", b"three"]


async def test_stream_missing_is_raised_when_the_stream_is_deleted(rabbit: Rabbit) -> None:
    """Trying for ever would help nobody: a person must say what should become of the stream."""
    partition = await rabbit.new_partition()
    publisher = await (await rabbit.new_log()).publisher(partition, "pump")
    await publisher.publish([b"one"], [1])
    await rabbit.management.delete(partition.name)

    with pytest.raises(StreamMissing, match=partition.name):
        await asyncio.wait_for(publisher.publish([b"two"], [2]), 30)


async def test_large_batch_arrives_when_it_exceeds_the_frame_limit(rabbit: Rabbit) -> None:
    """Three hundred messages of 10 KB go out in frames that the broker takes."""
    partition = await rabbit.new_partition()
    publisher = await (await rabbit.new_log()).publisher(partition, "pump")
    messages = [b"%d " % number + b"." * 10_000 for number in range(300)]

    await publisher.publish(messages, range(300))

    assert await rabbit.stored(partition) == messages


async def test_id_zero_is_stored_when_it_is_the_first_of_a_name(rabbit: Rabbit) -> None:
    """The broker answers 0 both for an unknown name and for a highest id of 0: nothing may be left out for it."""
    partition = await rabbit.new_partition()
    publisher = await (await rabbit.new_log()).publisher(partition, "pump")
    rabbit.proxy.freeze(down=False)
    publishing = asyncio.create_task(publisher.publish([b"zero", b"one"], [0, 1]))
    await asyncio.sleep(0.1)
    rabbit.proxy.cut()

    await asyncio.wait_for(publishing, 20)

    assert await rabbit.stored(partition) == [b"zero", b"one"]
