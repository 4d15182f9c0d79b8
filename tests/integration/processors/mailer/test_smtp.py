"""Mails over real sockets to a server that misbehaves on request; on both event loops, in clear and in TLS."""

import asyncio
import functools
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiosmtplib
import pytest
import trustme

from processors._demo.sink import Sink
from processors.mailer.mail import BadAddress, Frame, Sender, message_id
from processors.mailer.smtp import NotDelivered, OutcomeUnknown, Pool, Refused, SetupFault, SmtpConfig
from processors.mailer.transaction import Connection
from streams.errors import LeaseOver

FROM = "noreply@example.org"
ANA = "ana@example.com"
USERS = {"mailer": "s3cret"}
FRAME = Frame(Sender(FROM, "Secretaria de Cultura"))
OFFERS = [pytest.param(True, id="pipelining"), pytest.param(False, id="one_by_one")]


@dataclass
class OpenGate:
    """Lets everything through, counts, and may do something at either point."""

    waits: int = 0
    checks: int = 0
    at_wait: Callable[[], Awaitable[object]] | None = None
    at_check: Exception | None = None
    limited: bool = True

    async def wait(self) -> None:
        self.waits += 1
        if self.at_wait:
            await self.at_wait()

    def check(self) -> None:
        self.checks += 1
        if self.at_check:
            raise self.at_check


@functools.cache
def mail(n: int = 1, text: str = "Olá!\n.\n..x\nFrom eve\n") -> bytes:
    """The bytes of a mail with a Message-ID of its own; always the same, although mails are dated."""
    key = message_id(f"{n:064x}"[::-1], "example.org")
    return FRAME.encode(to=ANA, name="Ana", message_id=key, subject=f"mail {n}", text=text, html="<p>Olá!</p>")


@asynccontextmanager
async def served(config: dict[str, Any] | None = None, slots: int = 1, **sink: Any) -> AsyncIterator[tuple[Sink, Pool]]:
    """A sink with these traits, and a pool with short times that sends to it."""
    server = Sink(**sink)
    await server.start()
    short = SmtpConfig(
        "localhost", server.port, security="none", local_hostname="test", connect_timeout=5, reply_timeout=5
    )
    pool = Pool(replace(short, **(config or {})), slots)
    try:
        yield server, pool
    finally:
        await pool.close()
        await server.stop()


async def send(
    pool: Pool, to: str = ANA, body: bytes | None = None, gate: OpenGate | None = None, within: float = 20
) -> str:
    """One mail with a bound in time."""
    deadline = asyncio.get_running_loop().time() + within
    return await pool.send(FROM, to, body or mail(), gate or OpenGate(), deadline)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Whom the tests trust."""
    return trustme.CA()


@pytest.fixture(scope="module")
def certificate(authority: trustme.CA) -> ssl.SSLContext:
    """The server's side of TLS for localhost."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    return context


@pytest.fixture(scope="module")
def ca_file(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the client trusts."""
    path = tmp_path_factory.mktemp("tls") / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return str(path)


async def opened(pool: Pool) -> Connection:
    """The connection on which the pool will send its next mail."""
    connection = await pool._open(asyncio.get_running_loop().time() + 5)
    pool._give_back(connection)
    return connection


def patience(do: str) -> dict[str, Any]:
    """Short where the test must wait for it, and long enough for a busy machine elsewhere."""
    return {"reply_timeout": 1.0 if do == "freeze" else 5.0}


async def until(condition: Callable[[], bool]) -> None:
    """Look again and again, for at most ten seconds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it never came true")


def tls(security: str, certificate: ssl.SSLContext) -> dict[str, Any]:
    """How the sink offers TLS."""
    return {security: certificate}


# ---- what a server gets


@pytest.mark.parametrize("pipelining", OFFERS)
@pytest.mark.parametrize("drip", [False, True])
async def test_server_gets_exactly_the_bytes_whatever_it_offers(pipelining: bool, drip: bool) -> None:
    """Envelope and mail arrive unchanged, also when replies come byte by byte; the reply's text comes back."""
    async with served(pipelining=pipelining, drip=drip) as (sink, pool):
        gate = OpenGate()
        assert await send(pool, gate=gate) == "2.0.0 ok: kept"
        await send(pool, body=mail(2))
        assert [(m.sender, m.recipients, m.raw) for m in sink.mails] == [(FROM, (ANA,), mail(n)) for n in (1, 2)]
        assert sink.connections == 1
        assert (gate.waits, gate.checks) == (1, 1)


HARD = [
    b"Subject: x\r\n\r\n.\r\n",
    b".begins with a dot\r\n\r\n..\r\n.a\r\n\r\n.",
    b"\r\n.\r\n.\r\n",
    b"Subject: x\r\n\r\n" + b".\r\n" * 100_000,
]


@pytest.mark.parametrize("body", [b if b.endswith(b"\r\n") else b + b"\r\n" for b in HARD], ids=range(len(HARD)))
async def test_server_gets_the_same_bytes_from_us_as_from_aiosmtplib(body: bytes) -> None:
    """Our transaction stands beside the library's: lines of a dot, dots at the begin of lines, many of them."""
    async with (
        served() as (sink, pool),
        aiosmtplib.SMTP(hostname="localhost", port=sink.port, start_tls=False) as client,
    ):
        await client.sendmail(FROM, [ANA], body)
        await send(pool, body=body)
        theirs, ours = sink.mails
        assert ours.raw == theirs.raw == body
        assert (ours.sender, ours.recipients) == (theirs.sender, theirs.recipients)


async def test_body_is_out_of_our_hands_before_the_gate_when_the_server_reads_slowly() -> None:
    """A dot behind a full buffer would go out some time after its lease was checked."""
    body = b"Subject: x\r\n\r\n" + (b"x" * 998 + b"\r\n") * 20_000
    async with served() as (sink, pool):
        connection = await opened(pool)
        left: list[int] = []

        async def look() -> None:
            left.append(connection._transport.get_write_buffer_size())

        sink.script("body", delay=0.3)
        await send(pool, body=body, gate=OpenGate(at_wait=look))
        assert left == [0]
        assert sink.mails[0].raw == body


async def test_mails_share_the_connections_when_many_are_sent_at_once() -> None:
    """The pool opens no more than its size and gives each mail a connection of its own."""
    async with served(slots=4) as (sink, pool):
        await asyncio.gather(*(send(pool, f"a{n}@example.com", mail(n)) for n in range(100)))
        assert sorted(m.recipients[0] for m in sink.mails) == sorted(f"a{n}@example.com" for n in range(100))
        assert all(m.raw == mail(int(m.recipients[0][1:].split("@")[0])) for m in sink.mails)
        assert sink.connections == 4


# ---- TLS and login


@pytest.mark.parametrize("security", ["tls", "starttls"])
@pytest.mark.parametrize("pipelining", OFFERS)
async def test_mail_goes_out_in_tls_and_after_login_when_both_are_set(
    security: str, pipelining: bool, certificate: ssl.SSLContext, ca_file: str
) -> None:
    """The secured and logged-in connection can be taken over for the transaction, also for a large mail."""
    config = {"security": security, "ca_file": ca_file, "username": "mailer", "password": "s3cret"}
    body = b"Subject: x\r\n\r\n" + (b"x" * 998 + b"\r\n") * 3_000
    async with served(config, users=USERS, pipelining=pipelining, **tls(security, certificate)) as (sink, pool):
        for part in (mail(), body, mail(2)):
            await send(pool, body=part)
        assert [m.raw for m in sink.mails] == [mail(), body, mail(2)]
        assert sink.connections == 1
        assert {secure for verb, secure in sink.commands if verb in {"AUTH", "MAIL", "RCPT", "DATA"}} == {True}


async def test_nothing_is_said_in_clear_when_starttls_is_wanted_and_not_offered(ca_file: str) -> None:
    """Neither password nor mail, however many mails wait; the fault is one of the set-up."""
    config = {"security": "starttls", "ca_file": ca_file, "username": "mailer", "password": "s3cret"}
    async with served(config, users=USERS) as (sink, pool):
        for _ in range(3):
            with pytest.raises(SetupFault) as caught:
                await send(pool)
            assert caught.value.kind == "starttls"
        assert {verb for verb, _ in sink.commands} == {"EHLO"}


@pytest.mark.parametrize("security", ["tls", "starttls"])
async def test_nothing_is_said_when_the_certificate_is_not_trusted(security: str, certificate: ssl.SSLContext) -> None:
    """A certificate of an unknown authority is a fault of the set-up, named tls whichever way TLS begins."""
    config = {"security": security, "username": "mailer", "password": "s3cret"}
    async with served(config, users=USERS, **tls(security, certificate)) as (sink, pool):
        with pytest.raises(SetupFault) as caught:
            await send(pool)
        assert caught.value.kind == "tls"
        assert not {verb for verb, _ in sink.commands} & {"AUTH", "MAIL"}


async def test_certificate_is_not_looked_at_when_verification_is_off(certificate: ssl.SSLContext) -> None:
    """For a server inside the house with a certificate of its own making."""
    async with served({"security": "tls", "verify": False}, tls=certificate) as (sink, pool):
        await send(pool)
        assert len(sink.mails) == 1


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ({"at": "connect", "reply": "554 5.7.1 not you"}, "greeting"),
        ({"at": "connect", "reply": "421 4.3.2 busy"}, "greeting"),
        ({"at": "connect", "do": "close"}, "connect"),
        ({"at": "ehlo", "reply": "550 5.7.1 no"}, "greeting"),
        ({"at": "auth", "reply": "535 5.7.8 wrong password"}, "auth"),
        ({"at": "auth", "reply": "454 4.7.0 later"}, "auth"),
        ({"at": "starttls", "reply": "454 4.7.0 later"}, "starttls"),
        ({"at": "connect", "do": "freeze"}, "timeout"),
        ({"at": "auth", "do": "freeze"}, "timeout"),
    ],
)
async def test_fault_of_the_setup_has_its_kind_and_passes_when_it_is_mended(
    script: dict[str, Any], kind: str, certificate: ssl.SSLContext, ca_file: str
) -> None:
    """Equal for all mails that fail alike, so that they can be counted; the pool needs no restart afterwards."""
    config: dict[str, Any] = {"security": "starttls", "ca_file": ca_file, "username": "m", "password": "p"}
    if kind == "timeout":
        config["connect_timeout"] = 1
    async with served(config, users={"m": "p"}, starttls=certificate) as (sink, pool):
        sink.script(**script)
        for attempt in (send, lambda pool: pool.probe()):
            with pytest.raises(SetupFault) as caught:
                await attempt(pool)
            assert caught.value.kind == kind
        sink.forget()
        await pool.probe()
        await send(pool)
        assert len(sink.mails) == 1


async def test_setup_fault_is_connect_when_nobody_listens() -> None:
    """As after a restart of the server that has not come up yet."""
    async with served() as (sink, pool):
        await sink.stop()
        with pytest.raises(SetupFault) as caught:
            await send(pool)
        assert caught.value.kind == "connect"
        await sink.start()
        await send(pool)
        assert len(sink.mails) == 1


# ---- refusals


@pytest.mark.parametrize("pipelining", OFFERS)
@pytest.mark.parametrize("stage", ["mail", "rcpt", "data", "dot"])
@pytest.mark.parametrize("reply", ["451 4.7.1 try later", "550-5.1.1 no\n550 5.1.1 such user"])
async def test_refusal_has_code_text_and_stage_and_the_next_mail_uses_the_same_connection(
    stage: Any, reply: str, pipelining: bool
) -> None:
    """The server said no to one mail: nothing is wrong with the connection, and the next one goes out on it."""
    async with served(pipelining=pipelining) as (sink, pool):
        sink.script(stage, reply=reply, times=1)
        with pytest.raises(Refused) as caught:
            await send(pool)
        refused = caught.value
        assert (refused.code, refused.stage) == (int(reply[:3]), "dot" if stage == "dot" else stage.upper())
        assert refused.text.startswith(reply[4:9])
        await send(pool, body=mail(2))
        assert [m.raw for m in sink.mails] == [mail(2)]
        assert sink.connections == 1


async def test_text_of_a_refusal_names_no_address_when_the_server_repeats_it() -> None:
    """It ends up in logs and reports."""
    async with served() as (sink, pool):
        sink.script("rcpt", reply=f"550 5.1.1 <{ANA}>: unknown\x1b[31m")
        with pytest.raises(Refused) as caught:
            await send(pool)
        assert caught.value.text == "5.1.1 <<address>>: unknown [31m"


@pytest.mark.parametrize("pipelining", OFFERS)
async def test_nobody_gets_a_mail_when_the_recipient_is_refused_and_data_accepted(pipelining: bool) -> None:
    """RFC 2920: such a server gets a lone dot; what it was not to get is never written, and the connection goes on."""
    async with served(pipelining=pipelining) as (sink, pool):
        sink.script("rcpt", reply="550 5.1.1 unknown", times=1)
        sink.script("data", reply="354 go ahead all the same", times=1)
        with pytest.raises(Refused) as caught:
            await send(pool)
        assert (caught.value.code, caught.value.stage) == (550, "RCPT")
        sink.forget()
        await send(pool, body=mail(2))
        assert [m.raw for m in sink.mails] == [mail(2)]
        assert sink.connections == 1


async def test_no_empty_mail_goes_out_when_the_sender_is_refused_and_all_else_accepted() -> None:
    """Here a lone dot would be a mail to the recipient: the connection is cut."""
    async with served() as (sink, pool):
        sink.script("mail", reply="451 4.1.0 not now", times=1)
        sink.script("rcpt", reply="250 2.1.5 ok", times=1)
        sink.script("data", reply="354 go ahead", times=1)
        with pytest.raises(Refused) as caught:
            await send(pool)
        assert (caught.value.code, caught.value.stage) == (451, "MAIL")
        await send(pool, body=mail(2))
        assert [m.raw for m in sink.mails] == [mail(2)]
        assert sink.connections == 2


async def test_mail_is_refused_before_any_command_when_it_is_larger_than_the_server_takes() -> None:
    """SIZE was offered, so nothing has to be tried."""
    async with served(size=2000) as (sink, pool):
        with pytest.raises(Refused) as caught:
            await send(pool, body=mail(text="x" * 5000))
        assert (caught.value.code, caught.value.stage) == (552, "MAIL")
        await send(pool)
        assert [verb for verb, _ in sink.commands].count("MAIL") == 1


@pytest.mark.parametrize(
    "address",
    ["sam@example.com\r\nRCPT TO:<eve@example.com>", "a@example.com\n", "<a@example.com>", "josé@example.com"],
)
async def test_no_connection_is_made_when_the_address_cannot_be_written(address: str) -> None:
    """Neither as recipient nor as sender."""
    async with served() as (sink, pool):
        with pytest.raises(BadAddress):
            await send(pool, address)
        with pytest.raises(BadAddress):
            await pool.send(address, ANA, mail(), OpenGate(), asyncio.get_running_loop().time() + 5)
        assert sink.connections == 0


# ---- connections that end


async def test_next_mail_goes_out_at_once_when_the_server_closed_the_idle_connection_with_421() -> None:
    """A reply that nobody asked for is no answer to the next command."""
    async with served(idle_seconds=0.1) as (sink, pool):
        await send(pool)
        await until(lambda: not pool._idle[0].usable)
        await send(pool, body=mail(2))
        assert [m.raw for m in sink.mails] == [mail(), mail(2)]
        assert sink.connections == 2


@pytest.mark.parametrize("pipelining", OFFERS)
@pytest.mark.parametrize("stage", ["mail", "rcpt", "data", "body", "dot"])
async def test_mail_goes_out_on_a_new_connection_when_the_server_says_421(stage: Any, pipelining: bool) -> None:
    """Wherever it comes: nothing was delivered, so that the same send tries once more, with one permit."""
    async with served(pipelining=pipelining) as (sink, pool):
        sink.script(stage, reply="421 4.3.2 shutting down", times=1)
        gate = OpenGate()
        await send(pool, gate=gate)
        assert [m.raw for m in sink.mails] == [mail()]
        assert sink.connections == 2
        assert gate.waits == 1


async def test_421_is_a_refusal_when_it_comes_twice() -> None:
    """One repetition is enough; then the mail waits for its next attempt."""
    async with served() as (sink, pool):
        sink.script("mail", reply="421 4.3.2 shutting down")
        with pytest.raises(Refused) as caught:
            await send(pool)
        assert (caught.value.code, caught.value.stage) == (421, "MAIL")
        assert sink.connections == 2


@pytest.mark.parametrize("pipelining", OFFERS)
@pytest.mark.parametrize("do", ["reset", "close", "freeze"])
async def test_mail_goes_out_on_a_new_connection_when_the_idle_one_had_died(do: Any, pipelining: bool) -> None:
    """Found at MAIL, before anything was accepted; a connection that died without a word is found by its time-out."""
    async with served(patience(do), pipelining=pipelining) as (sink, pool):
        await send(pool)
        sink.script("mail", do, times=1)
        await send(pool, body=mail(2))
        assert [m.raw for m in sink.mails] == [mail(), mail(2)]
        assert sink.connections == 2


async def test_all_mails_go_out_when_the_server_restarts_between_them() -> None:
    """Every idle connection of the pool dies at once."""
    async with served(slots=4) as (sink, pool):
        await asyncio.gather(*(send(pool, body=mail(n)) for n in range(4)))
        await sink.hang_up()
        await asyncio.gather(*(send(pool, body=mail(n)) for n in range(4, 8)))
        assert sorted(m.raw for m in sink.mails) == sorted(mail(n) for n in range(8))


@pytest.mark.parametrize("pipelining", OFFERS)
@pytest.mark.parametrize("do", ["reset", "close", "freeze"])
@pytest.mark.parametrize("stage", ["mail", "rcpt", "data", "body"])
async def test_mail_is_not_delivered_when_the_connection_ends_before_the_dot(
    stage: Any, do: Any, pipelining: bool
) -> None:
    """Whatever happens then, the server has no whole mail; a frozen one is given up after its time-out."""
    async with served(patience(do), pipelining=pipelining) as (sink, pool):
        sink.script(stage, do)
        gate = OpenGate(at_wait=lambda: asyncio.sleep(0.1))
        # At `body` a frozen server has the dot in its buffer: only it knows that it never reads it.
        frozen_with_dot = (stage, do) == ("body", "freeze")
        with pytest.raises(OutcomeUnknown if frozen_with_dot else NotDelivered):
            await send(pool, gate=gate)
        assert not sink.mails
        assert sink.connections == 1
        assert gate.checks == (1 if frozen_with_dot else 0)
        sink.forget()
        await send(pool, body=mail(2))
        assert [m.raw for m in sink.mails] == [mail(2)]


@pytest.mark.parametrize("do", ["reset", "close", "freeze"])
async def test_outcome_is_unknown_when_the_reply_to_the_dot_never_comes(do: Any) -> None:
    """The server has the mail and we do not know it: neither a repetition nor a `sent` is ours to decide."""
    async with served(patience(do)) as (sink, pool):
        sink.script("dot", do, times=1)
        with pytest.raises(OutcomeUnknown):
            await send(pool)
        assert len(sink.mails) == 1
        await send(pool, body=mail(2))
        assert len(sink.mails) == 2


@pytest.mark.parametrize(("at", "outcome"), [("mail", NotDelivered), ("dot", OutcomeUnknown)])
async def test_whole_send_is_bounded_by_its_deadline_when_the_server_is_slow(at: Any, outcome: type[Exception]) -> None:
    """However long a single reply may take; which error it is says whether the dot was out."""
    async with served({"reply_timeout": 60}) as (sink, pool):
        sink.script(at, delay=30)
        with pytest.raises(outcome):
            await send(pool, within=0.3)


async def test_mail_is_not_delivered_when_its_deadline_passes_in_the_queue() -> None:
    """Waiting for a free connection counts, too, and so does waiting for permission."""
    async with served() as (sink, pool):
        first = asyncio.create_task(send(pool, gate=OpenGate(at_wait=asyncio.Event().wait), within=1))
        await asyncio.sleep(0)
        with pytest.raises(NotDelivered, match="before a connection was free"):
            await send(pool, within=0.2)
        with pytest.raises(NotDelivered, match="before it might be sent"):
            await first
        assert not sink.mails


@pytest.mark.parametrize(
    ("reply", "unexpected"),
    [
        ("999 what", NotDelivered),
        ("hello", NotDelivered),
        ("250 2.1.0 ok\n250 2.1.5 ok\n354 go\n250 done", NotDelivered),
    ],
)
async def test_mail_is_not_delivered_when_replies_make_no_sense(reply: str, unexpected: type[Exception]) -> None:
    """A reply too many could be taken for that of the dot, and the mail for sent."""
    async with served() as (sink, pool):
        sink.script("mail", reply=reply)
        with pytest.raises(unexpected):
            await send(pool)
        assert not sink.mails


@pytest.mark.parametrize(
    ("reply", "outcome"), [("250 2.0.0 ok: kept", NotDelivered), ("552 5.2.3 enough", Refused), ("hm", NotDelivered)]
)
async def test_reply_that_comes_before_the_dot_is_never_taken_for_that_of_the_dot(
    reply: str, outcome: type[Exception]
) -> None:
    """A server that speaks unasked is not trusted with the dot; if it says no, that is what the mail failed of."""
    async with served() as (sink, pool):
        connection = await opened(pool)
        sink.script("body", reply=reply)
        gate = OpenGate(at_wait=lambda: until(lambda: not connection.usable))
        with pytest.raises(outcome):
            await send(pool, gate=gate)
        assert gate.checks == 0
        assert not sink.mails


async def test_connection_is_replaced_when_it_was_idle_for_too_long() -> None:
    """A firewall may have forgotten it without telling either side."""
    async with served({"idle_seconds": 0.0}) as (sink, pool):
        await send(pool)
        await send(pool, body=mail(2))
        assert sink.connections == 2


# ---- the gate


async def test_server_has_no_mail_when_the_lease_is_over_before_the_dot() -> None:
    """The check is the last thing before the dot; inside DATA only cutting the connection takes the mail back."""
    async with served() as (sink, pool):
        with pytest.raises(LeaseOver):
            await send(pool, gate=OpenGate(at_check=LeaseOver("over")))
        assert not pool._idle
        await send(pool, body=mail(2))
        assert [m.raw for m in sink.mails] == [mail(2)]
        assert sink.connections == 2


async def test_server_has_no_mail_while_permission_is_not_given() -> None:
    """Everything but the dot is there, so that the time in doubt is as short as it can be."""
    async with served() as (sink, pool):
        asked, given = asyncio.Event(), asyncio.Event()

        async def permission() -> None:
            asked.set()
            await given.wait()

        task = asyncio.create_task(send(pool, gate=OpenGate(at_wait=permission)))
        await asyncio.wait_for(asked.wait(), 5)
        await until(lambda: ("DATA", False) in sink.commands)
        assert not sink.mails
        given.set()
        await task
        assert len(sink.mails) == 1


async def test_server_has_no_mail_and_the_pool_goes_on_when_a_send_is_cancelled_before_the_dot() -> None:
    """A stop of the process may come at any moment."""
    async with served() as (sink, pool):
        asked = asyncio.Event()

        async def permission() -> None:
            asked.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(send(pool, gate=OpenGate(at_wait=permission)))
        await asyncio.wait_for(asked.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not pool._idle
        await send(pool, body=mail(2))
        assert [m.raw for m in sink.mails] == [mail(2)]


async def test_pool_says_quit_when_it_is_closed() -> None:
    """The server need not wait for a time-out of its own."""
    async with served() as (sink, pool):
        await send(pool)
        await pool.close()
        await until(lambda: sink.commands[-1][0] == "QUIT")


async def test_pool_is_closed_in_time_when_the_server_is_frozen() -> None:
    """Shutting down waits for nobody."""
    async with served() as (sink, pool):
        await send(pool)
        sink.script("mail", "freeze")
        async with asyncio.timeout(5):
            await pool.close()
