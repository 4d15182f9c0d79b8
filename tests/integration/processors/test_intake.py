"""Intake on a real broker: every delivery is published, or laid to rest, or put back; never stuck, never lost."""

import asyncio
import json
from typing import Any

import pytest

from models.slices import MAX_SLICE_BYTES
from processors import _queues, intake
from processors._amqp import AmqpRefused
from streams.errors import LogError
from streams.testing import eventually
from tests.support.amqp import Stage, amqp_url

LIST = [{"registration": 1, "agent_name": "Ana Exemplo"}, {"registration": 2, "agent_name": "João Exemplo"}]

BAD_BODIES = {
    b"": "not_json",
    b"{not json": "not_json",
    b'{"registration": 1}': "not_an_array",
    b'"text"': "not_an_array",
    b'[{"registration": NaN}]': "not_json",
    b'[{"registration": -Infinity}]': "not_json",
    b'[{"registration": 1e400}]': "not_json",
    b'\xef\xbb\xbf[{"registration": 1}]': "byte_order_mark",
    b'[{"agent_name": "Jos\xe9"}]': "not_utf8",
    b"[" * 5000 + b"]" * 5000: "too_deep",
    b"[" + b" " * 20_000 + b"]": "too_large",
}

Reports = list[BaseException]


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Reports:
    """Every error that intake reports."""
    found: Reports = []
    monkeypatch.setattr(intake, "capture_failure", lambda error, processor: found.append(error))
    return found


# ---- the good path


async def test_list_is_in_the_stream_and_acked_when_it_was_published(stage: Stage) -> None:
    """As it came, byte for byte, with its batch id; and nobody asked a database."""
    body = json.dumps(LIST, ensure_ascii=False).encode()
    await stage.start()
    await stage.publish(body, content_type="application/json")
    await stage.settled(1)
    [record] = await stage.records()
    assert (record.body, record.type, record.headers["total"]) == (body, "import", 2)
    await stage.stop()
    assert await stage.ready() == 0


async def test_empty_list_is_acked_and_the_next_one_handled_when_both_come(stage: Stage) -> None:
    """Nothing is a legal number of registrations (O-04)."""
    await stage.start()
    await stage.publish([])
    await stage.publish(LIST)
    await stage.settled(2)
    assert [record.headers["total"] for record in await stage.records()] == [0, 2]
    assert await stage.letters() == []


async def test_list_arrives_in_slices_when_it_is_larger_than_a_message(stage: Stage) -> None:
    """All of it, in order, under one batch id; each record fits a frame (O-23)."""
    items = [{"registration": n, "agent_name": "x" * 10_000} for n in range(300)]
    await stage.start()
    await stage.publish(items)
    await stage.settled(1)
    records = await stage.records()
    assert len(records) > 5
    assert max(len(record.body) for record in records) <= MAX_SLICE_BYTES
    assert len({record.headers["batch"] for record in records}) == 1
    assert await stage.items() == items


async def test_several_lists_are_in_hand_at_once_when_prefetch_allows_it(stage: Stage) -> None:
    """They are published one after another all the same."""
    for n in range(20):
        await stage.publish([{"registration": n}])
    await stage.start(AMQP_PREFETCH=5)
    await stage.settled(20)
    assert sorted(item["registration"] for item in await stage.items()) == list(range(20))


# ---- what no try will mend


async def test_bad_bodies_are_dead_letters_with_their_reason_when_no_policy_is_in_force(
    stage: Stage, reports: Reports
) -> None:
    """Intake puts them there itself, confirmed; nothing may be discarded before somebody has set the policy."""
    for body in BAD_BODIES:
        await stage.publish(body, message_id="m", headers={"tenant": "a", "ratio": 1.5})
    await stage.publish(LIST)
    await stage.start(AMQP_MAX_BODY_BYTES=20_000)
    await stage.settled(1, len(BAD_BODIES))
    letters = await stage.letters()
    assert {letter.body: letter.headers[_queues.REASON] for letter in letters} == BAD_BODIES
    assert {letter.properties["message_id"] for letter in letters} == {"m"}
    assert {(letter.headers["tenant"], letter.headers["ratio"]) for letter in letters} == {("a", 1.5)}
    assert len(reports) == len(BAD_BODIES)
    assert await stage.items() == LIST


async def test_bad_bodies_are_moved_by_the_broker_when_the_policy_is_in_force(stage: Stage) -> None:
    """Rejected without requeue: five without message id are five dead letters, and none comes twice (O-25)."""
    await stage.start()
    await stage.apply_policy()
    for n in range(5):
        await stage.publish(b"{not json %d" % n, headers={"tenant": "a"})
    await stage.settled(0, 5)
    await stage.publish(LIST)
    await stage.settled(1, 5)
    letters = await stage.letters()
    assert [letter.body for letter in letters] == [b"{not json %d" % n for n in range(5)]
    for letter in letters:
        [death] = letter.headers["x-death"]
        assert (death["reason"], death["count"], death["queue"]) == ("rejected", 1, stage.queues.queue)
        assert letter.headers["tenant"] == "a"
        assert _queues.REASON not in letter.headers
    await stage.stop()
    assert await stage.ready() == 0


async def test_bad_body_is_kept_when_the_management_does_not_answer(stage: Stage, unused_tcp_port: int) -> None:
    """Who cannot ask whether the policy is in force must not rely on it."""
    await stage.start(MANAGEMENT_URL=f"http://u:p@127.0.0.1:{unused_tcp_port}")
    await stage.publish(b"nonsense")
    await stage.settled(0, 1)
    assert [letter.headers[_queues.REASON] for letter in await stage.letters()] == ["not_json"]


async def test_item_is_a_dead_letter_of_its_own_when_it_is_too_large(stage: Stage) -> None:
    """It says which of which batch it was; the others go on, and it is counted among them."""
    giant = {"registration": 2, "agent_name": "x" * 2_000_000}
    await stage.start()
    await stage.publish([LIST[0], giant, LIST[1]])
    await stage.settled(1)
    [letter] = await stage.letters()
    assert json.loads(letter.body) == giant
    records = await stage.records()
    assert (letter.headers[_queues.INDEX], letter.headers[_queues.BATCH]) == (1, records[0].headers["batch"])
    assert letter.headers[_queues.REASON] == "too_large"
    items = await stage.items()
    assert (len(items), items[0], items[2]) == (3, *LIST)


# ---- the stream is away


async def test_list_is_put_back_with_a_count_and_published_when_the_stream_returns(stage: Stage) -> None:
    """As often as allowed, on one connection all the while; once it is published it is published once."""
    await stage.start(AMQP_RETRY_LIMIT=1000)
    stage.stream.refusing = True
    await stage.publish(LIST, message_id="m")

    def is_put_back_often() -> None:
        stage.check()
        assert stage.metric("afluente_acts_total", outcome="retry") >= 3

    await eventually(is_put_back_often)
    stage.stream.refusing = False
    await stage.settled(1)
    assert await stage.items() == LIST
    assert await stage.letters() == []
    assert stage.metric("afluente_reconnects_total", service="amqp") == 0


async def test_list_is_a_dead_letter_when_it_was_put_back_too_often(stage: Stage, reports: Reports) -> None:
    """With its count, its own headers, and why; each try was reported."""
    await stage.start(AMQP_RETRY_LIMIT=2)
    stage.stream.refusing = True
    await stage.publish(LIST, headers={"tenant": "a"}, message_id="m")
    await stage.settled(0, 1)
    [letter] = await stage.letters()
    assert json.loads(letter.body) == LIST
    assert letter.headers[_queues.RETRY_COUNT] == 2
    assert letter.headers[_queues.REASON] == "attempts_used_up"
    assert (letter.headers["tenant"], letter.properties["message_id"]) == ("a", "m")
    assert len(reports) == 3
    assert all(isinstance(error, LogError) for error in reports)


async def test_heartbeats_are_answered_when_a_list_waits_to_be_put_back(stage: Stage, reports: Reports) -> None:
    """The broker would end a connection that is silent for two heartbeats; the wait is longer."""
    url = amqp_url(stage.services, stage.amqp.port, "?heartbeat=1")
    await stage.start(AMQP_URL=url, AMQP_RETRY_WAITS_SECONDS="3.5")
    stage.stream.refusing = True
    await stage.publish(LIST)

    def has_failed() -> None:
        assert len(reports) == 1

    await eventually(has_failed)
    stage.stream.refusing = False
    await stage.settled(1)
    assert stage.metric("afluente_acts_total", outcome="retry") == 1
    assert stage.metric("afluente_reconnects_total", service="amqp") == 0


async def test_list_goes_back_uncounted_when_intake_stops_while_it_waits(stage: Stage) -> None:
    """A deploy in the middle of an outage uses up no try."""
    await stage.start(AMQP_RETRY_WAITS_SECONDS="60")
    stage.stream.refusing = True
    await stage.publish(LIST)

    async def is_taken() -> None:
        assert await stage.ready() == 0

    await eventually(is_taken)
    await stage.stop()
    [message] = await stage.messages(stage.queues.queue)
    assert _queues.RETRY_COUNT not in message.headers
    assert json.loads(message.body) == LIST


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RecursionError(),
        AssertionError("João Exemplo"),
        SystemError(),
        ExceptionGroup("g", [ValueError()]),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_list_is_put_back_and_reported_when_anything_at_all_is_raised(
    stage: Stage, reports: Reports, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whatever a library may raise: the list ends in the dead-letter queue at the latest, and intake lives."""

    async def broken(*_: object) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(intake, "publish_slices", broken)
        await stage.start(AMQP_RETRY_LIMIT=1)
        await stage.publish(LIST)
        await stage.settled(0, 1)
    assert reports == [error, error]
    [letter] = await stage.letters()
    assert (letter.headers[_queues.REASON], letter.headers[_queues.RETRY_COUNT]) == ("attempts_used_up", 1)
    assert "Exemplo" not in letter.headers[_queues.ERROR]
    await stage.publish(LIST)
    await stage.settled(1, 1)


async def test_list_stays_in_the_queue_when_it_can_not_even_be_moved(
    stage: Stage, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last resort against a mistake of ours: reported, unacked, and taken anew on a new connection."""

    def broken(*_: object, **__: object) -> Any:
        raise TypeError

    def is_reported() -> None:
        assert [type(error).__name__ for error in reports] == ["InvalidImport", "TypeError"]

    with monkeypatch.context() as patch:
        patch.setattr(_queues, "dead", broken)
        await stage.start()
        await stage.publish(b"{not json")
        await eventually(is_reported)
    await stage.settled(0, 1)
    assert [letter.body for letter in await stage.letters()] == [b"{not json"]


# ---- the AMQP side is away


async def test_every_list_arrives_when_connections_are_cut_again_and_again(stage: Stage) -> None:
    """A list may come twice then, which its keys absorb; none is missing, none is dead."""
    await stage.start()
    for n in range(30):
        await stage.publish([{"registration": n}])
        if n % 10 == 5:
            stage.amqp.cut()

    async def all_are_there() -> None:
        stage.check()
        assert {item["registration"] for item in await stage.items()} == set(range(30))

    await eventually(all_are_there, 30)

    def is_acked() -> None:
        assert stage.count("done") >= 30

    await eventually(is_acked)
    await stage.stop()
    assert (await stage.ready(), await stage.letters()) == (0, [])


async def test_dead_connection_is_noticed_when_nobody_closes_it(stage: Stage) -> None:
    """As behind a firewall that forgets: heartbeats tell, and a new connection goes on."""
    await stage.start(AMQP_URL=amqp_url(stage.services, stage.amqp.port, "?heartbeat=1"))
    stage.amqp.freeze()
    await stage.publish(LIST)
    await stage.settled(1)
    assert stage.metric("afluente_reconnects_total", service="amqp") == 1


async def test_intake_goes_on_when_its_queue_is_deleted_under_it(stage: Stage) -> None:
    """The broker cancels the consumer; the queue is declared anew."""
    await stage.start()
    await stage.management.call("DELETE", "queues", "/", stage.queues.queue)

    def is_reconnecting() -> None:
        assert stage.metric("afluente_reconnects_total", service="amqp") == 1

    await eventually(is_reconnecting)
    await stage.consuming()
    await stage.publish(LIST)
    await stage.settled(1)


async def test_list_is_published_once_when_its_ack_comes_too_late(stage: Stage) -> None:
    """The broker closes the channel of who is slow and delivers anew: else a slow list would circle for ever (O-24)."""
    ticks = "application:set_env(rabbit, channel_tick_interval, {})."
    await asyncio.to_thread(stage.services.do, "ctl", "eval", ticks.format(300))
    try:
        await stage.put_policy({"consumer-timeout": 1000})
        await stage.start()
        await stage.publish([])
        await stage.settled(1)
        stage.stream.freeze()
        await stage.publish(LIST)

        async def has_gone_back() -> None:
            assert await stage.ready() == 1

        await eventually(has_gone_back)
        stage.stream.thaw()
        await stage.settled(2)
        assert await stage.items() == LIST
    finally:
        await asyncio.to_thread(stage.services.do, "ctl", "eval", ticks.format(60_000))


async def test_intake_ends_when_the_broker_does_not_let_it_in(stage: Stage) -> None:
    """A wrong password does not mend itself: the process ends with its own code, and the pod shows it."""
    with pytest.raises(BaseExceptionGroup) as caught:
        await stage.start(AMQP_URL=f"amqp://nobody:wrong@127.0.0.1:{stage.services.amqp_port}/")
    assert caught.group_contains(AmqpRefused, match="ACCESS_REFUSED")


# ---- quorum queues


async def test_deliveries_in_vain_are_counted_when_the_queue_is_a_quorum_queue(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker's own count is honoured beside ours: three in vain, and the next failure is the last."""
    await stage.management.call("DELETE", "queues", "/", stage.queues.queue)
    quorum = {"durable": True, "arguments": {"x-queue-type": "quorum"}}
    await stage.management.call("PUT", "queues", "/", stage.queues.queue, body=quorum)
    await stage.channel.bind(stage.queues.exchange, stage.queues.queue, stage.queues.routing_key)
    await stage.publish(LIST)
    for _ in range(3):
        delivery = await eventually(lambda: _got(stage))
        stage.channel._channel.basic_nack(delivery.tag, requeue=True)
    with monkeypatch.context() as patch:
        patch.setattr(intake, "publish_slices", _away)
        await stage.start(AMQP_RETRY_LIMIT=3)
        await stage.settled(0, 1)
    [letter] = await stage.letters()
    assert letter.headers[_queues.REASON] == "attempts_used_up"
    assert _queues.RETRY_COUNT not in letter.headers
    await stage.publish(LIST)
    await stage.settled(1, 1)
    assert await stage.items() == LIST


async def _away(*_: object) -> Any:
    raise LogError("away")


async def _got(stage: Stage) -> Any:
    delivery = await stage.channel.get(stage.queues.queue)
    assert delivery is not None
    return delivery
