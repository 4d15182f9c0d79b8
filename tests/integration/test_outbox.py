"""The outbox as a whole: from the commit of an event to its request, and what a person does about those that failed."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import cast

import pytest
from sqlalchemy.exc import DBAPIError

from processors._http.request import RequestDescription
from processors._settings import Settings
from processors.sync.dispatchers import DISPATCHERS
from processors.sync.request import Dispatcher
from streams.exit_codes import ExitCode
from streams.testing import eventually
from tests.support.command import afluente
from tests.support.job import seconds
from tests.support.outbox import EVENT, TOKEN, Outbox
from tests.support.receiver import Receiver, Reply, Request
from tests.support.sites import Site

CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    """The new checkout, answering 201 until a test says otherwise."""
    async with Receiver() as receiver:
        yield receiver


def always(status: int, body: bytes = b"{}", **headers: str) -> Callable[[Request], Reply]:
    """The same for every request."""
    return lambda request: Reply(status, body, headers)


# ---- sent


async def test_committed_event_is_sent_once_with_its_time(site: Site, receiver: Receiver) -> None:
    """pending -> sent, sent_at, one attempt, one request with the agreed contract."""
    async with Outbox(site, receiver) as outbox:
        event = await outbox.insert('{"repayment": {"reference": "r-1"}}')
        row = await outbox.is_now(event, "sent")
        assert seconds(row["created_at"]) <= seconds(row["sent_at"]) <= await outbox.now()
        assert (row["attempts"], row["claim_no"], row["last_error"], row["lease_until"]) == (1, 1, None, None)
    [request] = receiver.requests
    assert (request.method, request.path) == ("POST", "/v1/sync/repayments")
    assert request.headers["authorization"] == f"Bearer {TOKEN}"
    assert request.headers["content-type"] == "application/json"
    assert json.loads(request.body) == {"repayment": {"reference": "r-1"}}


async def test_event_of_a_rolled_back_transaction_is_never_sent(services_site: Site, receiver: Receiver) -> None:
    """It exists if and only if the business transaction does."""
    async with Outbox(services_site, receiver) as outbox:
        async with outbox.engine.connect() as connection:
            await connection.exec_driver_sql(
                f"INSERT INTO outbox_events (event_name, payload) VALUES ('{EVENT}', '{{}}')"
            )
            await connection.rollback()
        last = await outbox.insert()
        await outbox.is_now(last, "sent")
        assert set(receiver.counts()) == {last}


async def test_bytes_are_those_of_the_database_and_the_same_in_every_attempt(site: Site, receiver: Receiver) -> None:
    """Money and ids pass no float, and a signature over the body would hold (O-38)."""
    replies = iter([Reply(500), Reply(500)])
    receiver.script = lambda request: next(replies, Reply())
    text = '{"b": 1, "a": 10.10, "id": 12345678901234567890, "rate": 0.1000, "nome": "Conceição", "a2": 1.0E+2}'
    async with Outbox(site, receiver) as outbox:
        event = await outbox.insert(text)
        await outbox.is_now(event, "sent")
    bodies = {request.body for request in receiver.requests}
    assert len(receiver.requests) == 3
    [body] = bodies
    numbers = json.loads(body, parse_float=str, parse_int=str)
    assert {name: numbers[name] for name in ("a", "b", "id", "rate")} == {
        "a": "10.10", "b": "1", "id": "12345678901234567890", "rate": "0.1000",
    }  # fmt: skip
    assert "Conceição".encode() in body
    assert int(receiver.requests[0].headers["content-length"]) == len(body)


async def test_trace_of_the_request_that_wrote_it_goes_on(site: Site, receiver: Receiver) -> None:
    """After a retry as well, unchanged: we record no spans of our own (O-51)."""
    replies = iter([Reply(500)])
    receiver.script = lambda request: next(replies, Reply())
    async with Outbox(site, receiver) as outbox:
        event, second = await outbox.insert(traceparent=CONTEXT), await outbox.insert()
        await outbox.is_now(second, "sent")
        await outbox.is_now(event, "sent")
    assert {request.headers.get("traceparent") for request in receiver.of(event)} == {CONTEXT}
    assert {request.headers.get("traceparent") for request in receiver.of(second)} == {None}
    assert len(receiver.requests) == 3


async def test_no_attempt_is_lost_to_connections_that_the_receiver_closes(site: Site, receiver: Receiver) -> None:
    """Idle connections end between any two events (O-37)."""
    async with Outbox(site, receiver) as outbox:
        for _ in range(15):
            await outbox.is_now(await outbox.insert(), "sent")
            receiver.drop()
        assert await outbox.events("attempts = 1") == 15
    assert set(receiver.counts().values()) == {1}


# ---- failed


async def test_event_is_failed_after_three_failures_with_status_and_body(site: Site, receiver: Receiver) -> None:
    """attempts 3, the last answer in last_error, one dead letter, the wait kept between attempts."""
    receiver.script = always(500, b'{"error": "boom"}')
    async with Outbox(site, receiver) as outbox:
        event = await outbox.insert()
        row = await outbox.is_now(event, "failed")
        assert (row["attempts"], row["last_error"], row["sent_at"]) == (3, 'HTTP 500: {"error": "boom"}', None)
        [letter] = await outbox.dead_letters()
        assert (letter["processor"], letter["table_name"], letter["row_id"]) == ("sync", "outbox_events", event)
        assert (letter["reason"], letter["attempts"], letter["source_stream"]) == (
            "attempts_used_up", 3, outbox.settings.outbox_stream,
        )  # fmt: skip
    times = [request.at for request in receiver.of(event)]
    assert len(times) == 3
    assert all(later - earlier >= 0.19 for earlier, later in pairwise(times))


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT retry_outbox_event({id})",
        "SELECT * FROM retry_outbox_events(event => 'new_checkout.repayment_sync')",
        "SELECT * FROM retry_outbox_events(error_like => 'HTTP 500%')",
        "UPDATE outbox_events SET status = 'pending', attempts = 0 WHERE id = {id}",
    ],
)
async def test_failed_event_is_sent_once_more_when_a_person_retries_it(
    services_site: Site, receiver: Receiver, statement: str
) -> None:
    """By function, by filter, by plain SQL: pending with attempts 0, and sent once."""
    receiver.script = always(500)
    async with Outbox(services_site, receiver) as outbox:
        event = await outbox.insert()
        await outbox.is_now(event, "failed")
        receiver.script = always(201)
        await outbox.sql(statement.format(id=event))
        row = await outbox.is_now(event, "sent")
        assert (row["attempts"], row["claim_no"], row["last_error"]) == (1, 4, None)
    assert receiver.counts() == Counter({event: 4})


async def test_command_retries_what_failed_and_says_what_it_does_not(site: Site, receiver: Receiver) -> None:
    """By id, by filter, all; sent ones and those in flight stay as they are; `status` counts (O-41)."""
    receiver.script = lambda request: Reply(500 if json.loads(request.body)["n"] else 201)
    async with Outbox(site, receiver) as outbox:
        sent = await outbox.insert('{"n": 0}')
        failed = [await outbox.insert(f'{{"n": {n}}}') for n in (1, 2, 3)]
        await outbox.is_now(sent, "sent")
        for event in failed:
            await outbox.is_now(event, "failed")
        assert (await outbox.status()).events == {"sent": 1, "failed": 3}
        receiver.script = always(201)
        done = await afluente(outbox.environment, "outbox", "retry", str(sent), str(failed[0]), "999")
        assert (done.code, done.out) == (ExitCode.FAILED, "1 event retried\n")
        assert f"event {sent} was sent: not retried" in done.err
        assert "there is no event 999" in done.err
        row = await outbox.is_now(failed[0], "sent")
        assert (row["attempts"], row["claim_no"]) == (1, 4)
        done = await afluente(outbox.environment, "outbox", "retry", "--event", EVENT, "--error", "HTTP 500")
        assert (done.code, done.out) == (ExitCode.OK, "2 events retried\n")
        await outbox.all_are("sent", 4)
        done = await afluente(outbox.environment, "outbox", "retry", "--all")
        assert (done.code, done.out) == (ExitCode.OK, "0 events retried\n")
    assert sorted(receiver.counts().values()) == [1, 4, 4, 4]


async def test_plain_update_retries_on_the_embedded_database_too(embedded_site: Site, receiver: Receiver) -> None:
    """Without NOTIFY the next poll finds it."""
    receiver.script = always(500)
    async with Outbox(embedded_site, receiver) as outbox:
        event = await outbox.insert()
        await outbox.is_now(event, "failed")
        receiver.script = always(201)
        await outbox.sql("UPDATE outbox_events SET status = 'pending', attempts = 0 WHERE id = :id", id=event)
        assert (await outbox.is_now(event, "sent"))["attempts"] == 1


async def test_event_that_fails_again_after_a_retry_is_listed_once_and_then_not_at_all(
    services_site: Site, receiver: Receiver
) -> None:
    """One row through it all (O-43)."""
    receiver.script = always(500)
    async with Outbox(services_site, receiver) as outbox:
        event = await outbox.insert()
        for _ in range(2):
            await outbox.is_now(event, "failed")
            assert [row["id"] for row in await outbox.sql("SELECT id FROM failed_outbox_events")] == [event]
            await outbox.sql("SELECT retry_outbox_event(:id)", id=event)
        await outbox.is_now(event, "failed")
        assert len(await outbox.sql("SELECT id FROM failed_outbox_events")) == 1
        receiver.script = always(201)
        await outbox.sql("SELECT retry_outbox_event(:id)", id=event)
        await outbox.is_now(event, "sent")
        assert await outbox.sql("SELECT id FROM failed_outbox_events") == []
        assert await outbox.events() == 1


async def test_one_event_fails_clearly_and_the_others_go_on_when_nobody_knows_its_name(
    site: Site, receiver: Receiver
) -> None:
    """A typing error in one application is a sentence on its event."""
    async with Outbox(site, receiver) as outbox:
        odd = await outbox.insert(name="new_checkout.repaymnt_sync")
        good = await outbox.insert()
        await outbox.is_now(good, "sent")
        row = await outbox.is_now(odd, "failed")
        assert row["attempts"] == 3
        assert "no dispatcher is registered for the event 'new_checkout.repaymnt_sync'" in row["last_error"]
    assert set(receiver.counts()) == {good}


async def test_event_says_which_settings_are_missing(site: Site, receiver: Receiver) -> None:
    """Nothing else is broken, and nothing is sent anywhere."""
    async with Outbox(site, receiver, NEW_CHECKOUT_API_URL=None, NEW_CHECKOUT_API_TOKEN=None) as outbox:
        row = await outbox.is_now(await outbox.insert(), "failed")
        assert row["last_error"] == "NEW_CHECKOUT_API_URL and NEW_CHECKOUT_API_TOKEN are not set: nothing was sent"
        assert row["doubts"] == 0
    assert receiver.connections == 0


async def test_redirect_is_a_failure_that_names_where_to(services_site: Site, receiver: Receiver) -> None:
    """The token goes to nobody else (O-35)."""
    async with Receiver() as other, Outbox(services_site, receiver, OUTBOX_MAX_ATTEMPTS=1) as outbox:
        ids = {}
        for status in (301, 302, 307, 308):
            receiver.script = always(status, Location=f"{other.url}/elsewhere")
            ids[status] = await outbox.insert()
            row = await outbox.is_now(ids[status], "failed")
            assert row["last_error"].startswith(f"HTTP {status} (Location: {other.url}/elsewhere): redirects are not")
        assert other.connections == 0
    assert {request.method for request in receiver.requests} == {"POST"}


async def test_three_requests_with_one_id_when_the_answer_always_comes_too_late(site: Site, receiver: Receiver) -> None:
    """The receiver has worked each time and can tell the repeats; the row says that nobody knows (O-34)."""
    receiver.script = lambda request: Reply(201, delay=1.0)
    async with Outbox(site, receiver, OUTBOX_TIMEOUT_SECONDS="0.2") as outbox:
        event = await outbox.insert()
        row = await outbox.is_now(event, "failed")
        assert (row["attempts"], row["doubts"]) == (3, 3)
        assert row["last_error"] == "timeout: no whole answer within 0.2 s"
        assert len(await outbox.dead_letters()) == 1
    assert receiver.counts() == Counter({event: 3})


async def test_no_secret_and_nobody_is_named_when_the_receiver_repeats_what_it_got(
    site: Site, receiver: Receiver
) -> None:
    """last_error is read by many."""
    receiver.script = lambda request: Reply(422, request.headers["authorization"].encode() + b" " + request.body)
    async with Outbox(site, receiver, OUTBOX_MAX_ATTEMPTS=1) as outbox:
        event = await outbox.insert('{"customer": {"name": "Ana Exemplo", "email": "ana@example.com"}, "ref": "r-77"}')
        error = (await outbox.is_now(event, "failed"))["last_error"]
        letters = json.dumps(await outbox.dead_letters(), default=str)
    for hidden in ("Ana Exemplo", "ana@example.com", TOKEN):
        assert hidden not in error
        assert hidden not in letters
    assert "r-77" in error


# ---- busy, away


async def test_busy_receiver_is_left_alone_and_other_events_go_on(site: Site, receiver: Receiver) -> None:
    """Retry-After is a minimum with a cap; nonsense and 0 are no hot loop (O-36)."""
    asked = {"1": "1", "2": "0", "3": "86400", "4": "abc"}

    def script(request: Request) -> Reply:
        n = json.loads(request.body)["n"]
        first = len(receiver.of(request.event)) == 1
        return Reply(429, headers={"Retry-After": asked[n]}) if first and n in asked else Reply()

    receiver.script = script
    async with Outbox(site, receiver) as outbox:
        ids = [await outbox.insert(json.dumps({"n": str(n)})) for n in range(6)]
        for event in (ids[0], ids[5], ids[1], ids[2], ids[4]):
            await outbox.is_now(event, "sent")
        waiting = await outbox.event(ids[3])
        assert (waiting["status"], waiting["attempts"]) == ("pending", 1)
        ahead = seconds(waiting["next_attempt_at"]) - await outbox.now()
        assert 850 < ahead <= 900
    waits = {n: receiver.of(ids[n])[1].at - receiver.of(ids[n])[0].at for n in (1, 2, 4)}
    assert waits[1] >= 0.99
    assert min(waits.values()) >= 0.19


async def test_all_go_out_by_themselves_when_the_receiver_was_away(site: Site, receiver: Receiver) -> None:
    """The breaker keeps most of their attempts: none is failed by an outage longer than three attempts (O-40)."""
    url, count = receiver.url, 120
    await receiver.stop()
    async with Outbox(site, receiver, BREAKER_THRESHOLD=10, OUTBOX_SLOTS=16, OUTBOX_SLOTS_PER_TARGET=8) as outbox:
        await outbox.insert_many(count)

        async def is_open() -> None:
            outbox.check()
            assert outbox.metric("afluente_breaker_open", processor="sync") == 1
            # whose provider is away waits for a time, and the reader is at the end
            assert await outbox.events("attempts = 0 AND next_attempt_at IS NOT NULL") > 0

        await eventually(is_open)
        await outbox.caught_up()
        assert await outbox.events("attempts > 0") < 60
        assert receiver.url == url
        await receiver.start()
        await outbox.all_are("sent", count)
        assert await outbox.events("attempts > 3") == 0
        assert outbox.metric("afluente_breaker_open", processor="sync") == 0
    assert set(receiver.counts().values()) == {1}


async def test_other_systems_get_theirs_while_one_is_away_or_slow(
    site: Site, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane for each: 60 events of a system that is slow stand before 20 of another, and hold up none."""

    def describe(payload: str, settings: Settings) -> RequestDescription:
        return RequestDescription("POST", f"{slow.url}/slow", {}, payload.encode(), 30.0)

    monkeypatch.setitem(cast(dict[str, Dispatcher], DISPATCHERS), "slow.event", Dispatcher("slow", describe))
    async with Receiver() as slow, Outbox(site, receiver, OUTBOX_SLOTS=8, OUTBOX_SLOTS_PER_TARGET=4) as outbox:
        slow.may_answer.clear()
        await outbox.insert_many(60, "slow.event")
        await outbox.insert_many(20)

        async def others_are_sent() -> None:
            outbox.check()
            assert await outbox.events(f"status = 'sent' AND event_name = '{EVENT}'") == 20

        await eventually(others_are_sent)
        assert slow.most_running == 4
        assert await outbox.events("status = 'sent' AND event_name = 'slow.event'") == 0
        slow.may_answer.set()
        await outbox.all_are("sent", 80)


async def test_failing_event_is_overtaken_and_the_receiver_can_tell(site: Site, receiver: Receiver) -> None:
    """No order is promised; id and time of each event are in its headers (O-39)."""

    def script(request: Request) -> Reply:
        failing = json.loads(request.body)["n"] == 1 and len(receiver.of(request.event)) < 3
        return Reply(500 if failing else 201)

    receiver.script = script
    async with Outbox(site, receiver, OUTBOX_RETRY_SECONDS="0.5") as outbox:
        created, updated = await outbox.insert('{"n": 1}'), await outbox.insert('{"n": 2}')
        await outbox.is_now(updated, "sent")
        assert (await outbox.event(created))["status"] == "pending"
        await outbox.is_now(created, "sent")
    [later] = receiver.of(updated)
    *_, last = receiver.of(created)
    assert int(last.headers["idempotency-key"]) < int(later.headers["idempotency-key"])
    assert last.headers["afluente-event-created-at"] < later.headers["afluente-event-created-at"]


# ---- at once


async def test_late_commit_of_a_lower_id_is_sent(services_site: Site, receiver: Receiver) -> None:
    """The relay selects by status, never above the last id (O-32)."""
    statement = f"INSERT INTO outbox_events (event_name, payload) VALUES ('{EVENT}', '{{\"n\": 1}}') RETURNING id"
    async with Outbox(services_site, receiver) as outbox, outbox.engine.connect() as slow:
        early = (await slow.exec_driver_sql(statement)).scalar_one()
        late = await outbox.insert()
        await outbox.is_now(late, "sent")
        assert early < late
        assert receiver.counts() == Counter({late: 1})
        await slow.commit()
        await outbox.is_now(early, "sent")
    assert receiver.counts() == Counter({early: 1, late: 1})


async def test_every_event_of_many_writers_is_sent_once(services_site: Site, receiver: Receiver) -> None:
    """Commits out of order, all the time (O-32)."""

    async def write(n: int) -> None:
        async with outbox.engine.connect() as connection:
            for _ in range(5):
                await connection.exec_driver_sql(
                    f"INSERT INTO outbox_events (event_name, payload) VALUES ('{EVENT}', '{{\"n\": {n}}}')"
                )
                await asyncio.sleep(0.005 * (n % 4))
                await connection.commit()

    async with Outbox(services_site, receiver) as outbox:
        await asyncio.gather(*(write(n) for n in range(10)))
        await outbox.all_are("sent", 50)
    assert len(receiver.counts()) == 50
    assert set(receiver.counts().values()) == {1}


async def test_each_event_is_sent_once_by_two_relays_and_two_syncs(services_site: Site, receiver: Receiver) -> None:
    """A rolling update runs two of each; the receiver is slow; no row is locked meanwhile (O-33)."""
    receiver.script = lambda request: Reply(delay=0.05)
    async with Outbox(services_site, receiver) as outbox, Outbox(services_site, receiver) as other:
        receiver.may_answer.clear()
        await outbox.insert_many(200)

        def some_are_under_way() -> None:
            assert receiver.running > 5

        await eventually(some_are_under_way)
        async with asyncio.timeout(5):
            await outbox.sql("UPDATE outbox_events SET attempts = 0")
        receiver.may_answer.set()
        await outbox.all_are("sent", 200)
        other.check()
    assert len(receiver.counts()) == 200
    assert set(receiver.counts().values()) == {1}


async def test_retry_is_refused_by_name_while_the_event_is_being_sent(services_site: Site, receiver: Receiver) -> None:
    """The function says so; the plain UPDATE starts nothing; one request (O-41)."""
    receiver.may_answer.clear()
    async with Outbox(services_site, receiver) as outbox:
        event = await outbox.insert()

        def is_under_way() -> None:
            assert receiver.running == 1

        await eventually(is_under_way)
        with pytest.raises(DBAPIError, match=rf"outbox event {event} is in progress until .*: not retried"):
            await outbox.sql("SELECT retry_outbox_event(:id)", id=event)
        await outbox.sql("UPDATE outbox_events SET status = 'pending', attempts = 0 WHERE id = :id", id=event)
        receiver.may_answer.set()
        await outbox.is_now(event, "sent")
        with pytest.raises(DBAPIError, match=f"outbox event {event} was sent: not retried"):
            await outbox.sql("SELECT retry_outbox_event(:id)", id=event)
        with pytest.raises(DBAPIError, match="there is no outbox event 999"):
            await outbox.sql("SELECT retry_outbox_event(999)")
    assert receiver.counts() == Counter({event: 1})


# ---- old rows


async def test_sent_events_are_deleted_when_they_are_old_and_no_others(site: Site, receiver: Receiver) -> None:
    """By the relay, by setting; what failed or waits stays, however old."""
    old = two_days_ago(site)
    async with Outbox(site, receiver, processors=("outbox_relay",), OUTBOX_RETENTION_DAYS=1) as outbox:
        await outbox.stop()
        sent, young, failed = [await outbox.insert() for _ in range(3)]
        await outbox.sql(f"UPDATE outbox_events SET created_at = {old} WHERE id <> :id", id=young)
        await outbox.sql(f"UPDATE outbox_events SET status = 'sent', sent_at = {old} WHERE id = :id", id=sent)
        await outbox.sql("UPDATE outbox_events SET status = 'sent', sent_at = created_at WHERE id = :id", id=young)
        await outbox.sql("UPDATE outbox_events SET status = 'failed' WHERE id = :id", id=failed)
        await outbox.start()

        async def is_pruned() -> None:
            outbox.check()
            assert [row["id"] for row in await outbox.sql("SELECT id FROM outbox_events ORDER BY id")] == [
                young,
                failed,
            ]

        await eventually(is_pruned)


def two_days_ago(site: Site) -> str:
    """SQL: a time two days ago."""
    if site.kind == "services":
        return "now() - interval '2 days'"
    return "strftime('%Y-%m-%d %H:%M:%f', 'now', '-2 days')"
