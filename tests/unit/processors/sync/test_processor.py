"""plan and act of the sync, with the network scripted."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from processors._http.answer import Answer, SendFailed
from processors._http.request import RequestDescription
from processors._http.sender import Sender
from processors._settings import Settings
from processors.sync import processor as sync
from processors.sync.request import Dispatcher
from streams.errors import LeaseOver, Reject, Retry
from streams.message import Message
from streams.processor import Claim, Gate, RowRef, clock

EVENT = "new_checkout.repayment_sync"
CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
Script = Callable[["Sent"], Answer]


@dataclass(frozen=True)
class Sent:
    """What would have gone out."""

    what: RequestDescription
    headers: Mapping[str, str]


class ScriptedSender(Sender):
    """Looks at the gate as the real one does, and answers what the script says."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script

    async def send(self, what: RequestDescription, headers: Mapping[str, str], gate: Any) -> Answer:
        await gate.wait()
        gate.check()
        return self._script(Sent(what, headers))


def settings(**values: Any) -> Settings:
    """Settings with the new checkout's."""
    values = {"new_checkout_api_url": "https://checkout.example.com", "new_checkout_api_token": "s3cret"} | values
    values |= {"database_url": "sqlite+aiosqlite:///a.db", "log_url": "embedded:///log.db"}
    return Settings(_env_file=None, **values)


def processor(script: Script, **values: Any) -> sync.Sync:
    """A sync whose requests are answered by the script."""
    return sync.Sync("outbox", settings(**values), ScriptedSender(script))


def claim(**row: Any) -> Claim:
    """The claim of an event."""
    values = {"event_name": EVENT, "payload": '{"a": 10.10}', "traceparent": None, "created_at": "2026-11-30 12:00:00"}
    return Claim(7, 3, 2, "7", values | row)


async def act(subject: sync.Sync, **row: Any) -> dict[str, object]:
    """Act on one event, with time enough."""
    gate = Gate(asyncio.get_running_loop().time() + 5, clock() + 60, None)
    return dict(await subject.act(claim(**row), gate))


def answers(status: int, text: str = "", **more: Any) -> Script:
    """Always the same."""
    return lambda sent: Answer(status, text, **more)


async def test_event_is_sent_with_what_a_receiver_needs_to_drop_repeats() -> None:
    """Id, attempt, name and time; the payload is the database's own text; the trace goes on as it came."""
    seen: list[Sent] = []

    def script(sent: Sent) -> Answer:
        seen.append(sent)
        return Answer(201, "")

    await act(processor(script), traceparent=CONTEXT)
    [sent] = seen
    assert (sent.what.method, sent.what.url) == ("POST", "https://checkout.example.com/v1/sync/repayments")
    assert sent.what.body == b'{"a": 10.10}'
    names = ("Idempotency-Key", "Afluente-Event", "Afluente-Attempt", "Afluente-Event-Created-At", "traceparent")
    assert [sent.headers[name] for name in names] == ["7", EVENT, "2", "2026-11-30T12:00:00.000000+00:00", CONTEXT]
    assert sent.what.headers["Authorization"] == "Bearer s3cret"


@pytest.mark.parametrize("context", [None, "", "nonsense", "00-x\r\nEvil: 1"])
async def test_no_trace_header_is_sent_when_there_is_no_sound_context(context: str | None) -> None:
    """Anybody may insert a row; what is in it becomes no header unless it is one."""

    def script(sent: Sent) -> Answer:
        assert "traceparent" not in sent.headers
        return Answer(201, "")

    await act(processor(script), traceparent=context)


@pytest.mark.parametrize("text", ["2026-11-30 12:00:00.5+00", "2026-11-30 10:00:00.5-02:00", "2026-11-30 12:00:00.500"])
async def test_time_is_the_same_whatever_database_wrote_it(text: str) -> None:
    """PostgreSQL's text has a zone, SQLite's is UTC."""

    def script(sent: Sent) -> Answer:
        assert sent.headers["Afluente-Event-Created-At"] == "2026-11-30T12:00:00.500000+00:00"
        return Answer(201, "")

    await act(processor(script), created_at=text)


async def test_a_repeat_is_a_success_when_the_receiver_knows_it_already() -> None:
    """200 with a duplicate answer."""
    assert await act(processor(answers(200, '{"status": "duplicate"}'))) == {}


@pytest.mark.parametrize(
    ("status", "fault"), [(500, "HTTP 500"), (401, "HTTP 401"), (404, None), (422, None), (302, None)]
)
async def test_anything_but_2xx_is_one_failed_attempt(status: int, fault: str | None) -> None:
    """Without distinction, as the owners asked; the fault is for the breaker."""
    with pytest.raises(Retry) as caught:
        await act(processor(answers(status, text="no")))
    assert str(caught.value).startswith(f"HTTP {status}")
    assert (caught.value.fault, caught.value.in_doubt) == (fault, False)


async def test_busy_receiver_is_left_alone_for_as_long_as_it_says() -> None:
    """Retry-After is a minimum."""
    with pytest.raises(Retry) as caught:
        await act(processor(answers(429, retry_after="30")))
    assert caught.value.not_before == 30.0


@pytest.mark.parametrize(
    ("error", "fault", "in_doubt"),
    [
        (SendFailed("cannot connect: no", "connect", False), "connect", False),
        (SendFailed("t", "timeout", True), "timeout", True),
    ],
)
async def test_failure_without_an_answer_says_whether_it_may_have_arrived(
    error: SendFailed, fault: str, in_doubt: bool
) -> None:
    """A time-out is unknown, no refusal."""

    class Failing(Sender):
        async def send(self, *_: Any) -> Any:
            raise error

    subject = sync.Sync("outbox", settings(), Failing())
    with pytest.raises(Retry) as caught:
        await act(subject)
    assert (caught.value.fault, caught.value.in_doubt) == (fault, in_doubt)


async def test_error_is_clear_when_no_dispatcher_knows_the_event() -> None:
    """Nothing is sent; the names that there are help to find the typing error."""
    subject = processor(answers(201))
    with pytest.raises(
        Retry, match=r"no dispatcher is registered for the event 'new_checkout\.repaymnt'; there are: new_ch"
    ):
        await act(subject, event_name="new_checkout.repaymnt")
    assert subject.lanes(3).of({"event_name": "x"}) == sync.UNKNOWN_LANE
    assert subject.lanes(3).of({"event_name": EVENT}) == "new_checkout"


async def test_error_names_the_settings_when_they_are_missing() -> None:
    """Visible on the event, no fault of the provider: it opens no breaker."""
    with pytest.raises(Retry, match="NEW_CHECKOUT_API_TOKEN is not set") as caught:
        await act(processor(answers(201), new_checkout_api_token=None))
    assert caught.value.fault is None


async def test_nothing_is_sent_when_the_lease_is_nearly_over() -> None:
    """Rule 9, for HTTP: before the request."""

    def script(sent: Sent) -> Answer:
        raise AssertionError("it was sent")

    gate = Gate(asyncio.get_running_loop().time() + 5, clock() - 1, None)
    with pytest.raises(LeaseOver):
        await processor(script).act(claim(), gate)


async def test_a_new_event_needs_a_dispatcher_and_a_line() -> None:
    """Method, success and body are its own; the rules are the sender's."""

    def script(sent: Sent) -> Answer:
        assert (sent.what.method, sent.what.body) == ("PUT", b"x")
        return Answer(409, "")

    def describe(payload: str, settings: Settings) -> RequestDescription:
        return RequestDescription("PUT", "http://other.example.com/y", {}, b"x", 1.0, success=lambda s: s == 409)

    subject = sync.Sync("outbox", settings(), ScriptedSender(script), {"y": Dispatcher("other", describe)})
    assert await act(subject, event_name="y") == {}


# ---- plan


def test_message_is_a_hint_to_look_at_its_row() -> None:
    """And what the relay writes is what sync reads."""
    message = sync.event_message({"id": 12, "attempts": 1})
    assert (message.id, message.type, message.version, message.attempt, message.body) == ("12", sync.EVENT, 1, 2, b"{}")
    assert processor(answers(201)).plan(message) == RowRef(12)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("1", "recipient", 1, 1, b"{}"), "unknown_type"),
        (Message("1", sync.EVENT, 2, 1, b"{}"), "unknown_type"),
        (Message("", sync.EVENT, 1, 1, b"{}"), "bad_message"),
        (Message("-1", sync.EVENT, 1, 1, b"{}"), "bad_message"),
        (Message("١", sync.EVENT, 1, 1, b"{}"), "bad_message"),
        (Message("9" * 19, sync.EVENT, 1, 1, b"{}"), "bad_message"),
    ],
)
def test_message_is_rejected_when_it_names_no_row(message: Message, reason: str) -> None:
    """Other programs may write to the stream: nothing is believed."""
    with pytest.raises(Reject) as caught:
        processor(answers(201)).plan(message)
    assert caught.value.reason == reason


def test_no_event_is_ever_made_from_a_message() -> None:
    """Only applications insert events, in their own transactions."""
    assert (sync.TABLE.insert, sync.TABLE.key) == ({}, None)
