"""The rules of sending, against a real server that misbehaves."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from processors._http.request import MAX_BODY, RequestDescription
from processors._http.sender import Answer, Sender, SendFailed
from streams.errors import LeaseOver
from streams.testing import eventually
from tests.support.receiver import Receiver, Reply

HEADERS = {"Idempotency-Key": "7"}


class OpenGate:
    """Lets everything pass, and counts."""

    def __init__(self) -> None:
        self.checks = 0

    async def wait(self) -> None:
        """Nothing to wait for."""

    def check(self) -> None:
        self.checks += 1


@pytest.fixture
async def sender() -> AsyncIterator[Sender]:
    """A sender with connections of its own."""
    sender = Sender()
    yield sender
    await sender.close()


def what(receiver: Receiver, **changes: object) -> RequestDescription:
    """A POST to it, with 5 s for the answer."""
    headers = {"Authorization": "Bearer s3cret", "Content-Type": "application/json"}
    request = RequestDescription("POST", f"{receiver.url}/v1/x?y=1", headers, b'{"a": 10.10}', 5.0)
    return replace(request, **changes)  # type: ignore[arg-type]  # a test's own words


async def send(sender: Sender, receiver: Receiver, **changes: object) -> Answer:
    """Send one request."""
    return await sender.send(what(receiver, **changes), dict(HEADERS), OpenGate())


async def failure(sender: Sender, receiver: Receiver, **changes: object) -> SendFailed:
    """Send one request that gets no answer."""
    with pytest.raises(SendFailed) as caught:
        await send(sender, receiver, **changes)
    return caught.value


async def test_request_arrives_as_it_is_described(sender: Sender) -> None:
    """Path, headers, length, bytes."""
    async with Receiver() as receiver:
        answer = await send(sender, receiver)
    assert (answer.status, answer.text) == (201, "{}")
    [request] = receiver.requests
    assert (request.method, request.path, request.body) == ("POST", "/v1/x?y=1", b'{"a": 10.10}')
    assert request.headers["content-length"] == "12"
    assert request.headers["authorization"] == "Bearer s3cret"
    assert request.headers["accept-encoding"] == "identity"


async def test_one_connection_is_kept_for_requests_that_follow_each_other(sender: Sender) -> None:
    """TCP and TLS once, not for each event."""
    async with Receiver() as receiver:
        for _ in range(5):
            await send(sender, receiver)
        assert receiver.connections == 1


async def test_no_event_pays_for_a_connection_that_the_server_has_closed(sender: Sender) -> None:
    """Idle connections closed between any two events, with and without time to notice (O-37)."""
    async with Receiver() as receiver:
        for n in range(40):
            assert (await send(sender, receiver)).status == 201
            receiver.drop()
            if n % 2:
                await asyncio.sleep(0.01)
        assert len(receiver.requests) == 40


@pytest.mark.parametrize("reset", [False, True])
async def test_kept_connection_that_breaks_before_any_byte_is_tried_once_more(sender: Sender, reset: bool) -> None:
    """On a new connection, with the same Idempotency-Key: the same attempt."""
    broken = iter([Reply(), Reply(raw=b"", reset=reset), Reply()])
    async with Receiver(lambda request: next(broken)) as receiver:
        await send(sender, receiver)
        assert (await send(sender, receiver)).status == 201
    first, lost, again = receiver.requests
    assert first.connection == lost.connection != again.connection
    assert (again.headers["idempotency-key"], again.body) == ("7", lost.body)


async def test_a_second_break_is_a_failure(sender: Sender) -> None:
    """Once more, and not again and again."""
    replies = iter([Reply(), Reply(raw=b""), Reply(raw=b""), Reply()])
    async with Receiver(lambda request: next(replies)) as receiver:
        await send(sender, receiver)
        error = await failure(sender, receiver)
    assert (error.fault, error.in_doubt, len(receiver.requests)) == ("disconnected", True, 3)


async def test_request_that_may_not_be_repeated_goes_out_once_on_its_own_connection(sender: Sender) -> None:
    """A charge is made at most once for each attempt, also where a kept connection has just been closed."""
    broken = iter([Reply(), Reply(raw=b""), Reply()])
    async with Receiver(lambda request: next(broken)) as receiver:
        await send(sender, receiver)
        error = await failure(sender, receiver, repeatable=False)
        receiver.drop()
        assert (await send(sender, receiver, repeatable=False)).status == 201
    assert (error.fault, error.in_doubt) == ("disconnected", True)
    assert [request.connection for request in receiver.requests] == [1, 2, 3]


async def test_request_without_a_body_sends_none(sender: Sender) -> None:
    """Some receivers refuse a GET that has one."""
    async with Receiver() as receiver:
        await send(sender, receiver, method="GET", body=b"", headers={})
    [request] = receiver.requests
    assert (request.method, request.body, request.headers.get("content-length")) == ("GET", b"", None)


async def test_more_of_a_body_is_read_when_the_request_wants_it(sender: Sender) -> None:
    """A list is longer than an error."""
    async with Receiver(lambda request: Reply(200, b"x" * 100_000)) as receiver:
        assert len((await send(sender, receiver, max_body=200_000)).text) == 100_000


async def test_new_connection_that_breaks_is_a_failure_at_once(sender: Sender) -> None:
    """The server was there and said nothing: it may have worked."""
    async with Receiver(lambda request: Reply(raw=b"")) as receiver:
        error = await failure(sender, receiver)
    assert (error.fault, error.in_doubt, len(receiver.requests)) == ("disconnected", True, 1)


@pytest.mark.parametrize(
    "part", [b"H", b"HTTP/1.1 2", b"HTTP/1.1 201 OK\r\nContent-Length: 9\r\n\r\nab", b"garbage\r\n\r\n"]
)
async def test_half_an_answer_on_a_kept_connection_is_not_repeated(sender: Sender, part: bytes) -> None:
    """The server has begun to answer, so it has worked: unknown, and one attempt."""
    replies = iter([Reply(), Reply(raw=part)])
    async with Receiver(lambda request: next(replies)) as receiver:
        await send(sender, receiver)
        error = await failure(sender, receiver)
    assert (error.fault, error.in_doubt, len(receiver.requests)) == ("protocol", True, 2)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirect_is_an_answer_and_is_not_followed(sender: Sender, status: int) -> None:
    """No POST becomes a GET, and no token goes to another host (O-35)."""
    async with Receiver() as other, Receiver() as receiver:
        receiver.script = lambda request: Reply(status, headers={"Location": f"{other.url}/elsewhere"})
        answer = await send(sender, receiver)
        assert (answer.status, answer.location) == (status, f"{other.url}/elsewhere")
        assert (len(receiver.requests), other.connections) == (1, 0)


async def test_time_out_is_over_the_whole_exchange(sender: Sender) -> None:
    """A server that drips headers or body keeps every single read short, and the whole is not."""
    async with Receiver() as receiver:
        receiver.script = lambda request: Reply(delay=3.0)
        error = await failure(sender, receiver, timeout=0.3)
        assert (error.fault, error.in_doubt) == ("timeout", True)
        assert str(error) == "timeout: no whole answer within 0.3 s"


async def test_time_out_is_kept_when_the_body_comes_in_drops() -> None:
    """One byte each 50 ms, for ever."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 201 OK\r\nContent-Length: 1000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b".")
            await asyncio.sleep(0.05)

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    sender = Sender()
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    with pytest.raises(SendFailed, match="timeout"):
        await sender.send(RequestDescription("POST", url, {}, b"{}", 0.5), {}, OpenGate())
    await sender.close()
    server.close()


async def test_body_is_cut_and_its_connection_closed_when_it_is_long(sender: Sender) -> None:
    """Memory and last_error are bounded, whatever a receiver says."""
    async with Receiver(lambda request: Reply(500, b"x" * 5_000_000)) as receiver:
        answer = await send(sender, receiver)
        assert (answer.status, answer.text) == (500, "x" * MAX_BODY)
        receiver.script = lambda request: Reply()
        assert (await send(sender, receiver)).status == 201
        assert receiver.connections == 2


async def test_body_is_readable_when_it_is_no_utf8(sender: Sender) -> None:
    """Latin-1 from an old server."""
    async with Receiver(lambda request: Reply(500, "não".encode("latin-1"))) as receiver:
        assert (await send(sender, receiver)).text == "n\ufffdo"


async def test_refused_connection_is_a_fault_of_the_system_and_nothing_was_sent(sender: Sender) -> None:
    """So it is not in doubt."""
    receiver = Receiver()
    async with receiver:
        pass
    error = await failure(sender, receiver)
    assert (error.fault, error.in_doubt) == ("connect", False)


@pytest.mark.parametrize("url", ["http://", "ftp://a.example.com/x", "nonsense", "http://x:y/"])
async def test_url_is_refused_when_it_leads_nowhere(sender: Sender, url: str) -> None:
    """A mistake in a dispatcher is a sentence on the event."""
    with pytest.raises(SendFailed, match="URL"):
        await sender.send(RequestDescription("POST", url, {}, b"{}", 1.0), {}, OpenGate())


async def test_lease_is_looked_at_right_before_each_request(sender: Sender) -> None:
    """Also before the repeat on a new connection."""

    class Once(OpenGate):
        def check(self) -> None:
            super().check()
            if self.checks > 1:
                raise LeaseOver("over")

    replies = iter([Reply(), Reply(raw=b""), Reply()])
    async with Receiver(lambda request: next(replies)) as receiver:
        await send(sender, receiver)
        with pytest.raises(LeaseOver):
            await sender.send(what(receiver), dict(HEADERS), Once())
        assert len(receiver.requests) == 2


async def test_certificate_is_verified(tmp_path: Path) -> None:
    """Against the given authority; without it nothing of the request is sent."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    async with Receiver(tls=context) as receiver:
        trusting, doubting = Sender(tmp_path / "ca.pem"), Sender()
        error = await failure(doubting, receiver)
        assert (error.fault, error.in_doubt, receiver.requests) == ("tls", False, [])
        assert (await send(trusting, receiver)).status == 201
        await trusting.close()
        await doubting.close()


async def test_many_are_under_way_at_once(sender: Sender) -> None:
    """The bound is the lane's, not the connections'."""
    async with Receiver() as receiver:
        receiver.may_answer.clear()
        posts = [asyncio.create_task(send(sender, receiver)) for _ in range(150)]

        def all_are() -> None:
            assert receiver.running == 150

        await eventually(all_are)
        receiver.may_answer.set()
        assert {answer.status for answer in await asyncio.gather(*posts)} == {201}
