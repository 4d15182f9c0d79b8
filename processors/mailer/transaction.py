"""One mail transaction on an open connection: MAIL, RCPT, DATA, body, and the final dot apart from all before it.

aiosmtplib opens, secures and logs in (`smtp.py`); then this protocol takes the transport over, because aiosmtplib can
neither send the three commands in one write nor stop before the dot. Until the dot is written a lost connection
delivers nothing (RFC 5321, 4.1.1.4); from then on only the server's reply tells what happened.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from processors.mailer.mail import ascii_address

Stage = Literal["MAIL", "RCPT", "DATA", "dot"]
_STAGES: tuple[Stage, ...] = ("MAIL", "RCPT", "DATA")

_CHUNK = 64 * 1024
_MAX_REPLY = 32 * 1024
_MAX_TEXT = 400
_CLOCK_STEP = 0.001
"""The loop's time has whole milliseconds only, and a timer may come up to one too early."""
_ADDRESS = re.compile(r"[^\s<>:;,]+@[^\s<>:;,]+")


class Gate(Protocol):
    """What must be true before the final dot may be written."""

    limited: bool
    """Whether `wait` may have to wait at all; if not, it is called all the same."""

    async def wait(self) -> None:
        """Wait for permission to have one more mail in doubt. Called once per send, when all but the dot is written."""
        ...

    def check(self) -> None:
        """Raise `LeaseOver` when the lease may have passed. The dot is written right after it, nothing is awaited."""
        ...


class SmtpError(Exception):
    """Base of what a send can end in; the texts hold no addresses."""


class Refused(SmtpError):
    """The server said no at `stage`: nothing is delivered."""

    def __init__(self, code: int, text: str, stage: Stage) -> None:
        super().__init__(f"{code} {text} (at {stage})")
        self.code = code
        self.text = text
        self.stage = stage


class NotDelivered(SmtpError):
    """The connection or the time ended before the final dot was written: nothing is delivered."""


class OutcomeUnknown(SmtpError):
    """The final dot was written and no reply came: the mail may be delivered or not."""


class Reply(NamedTuple):
    """One reply of the server; code 0 when it is none by the rules."""

    code: int
    text: str


class Gone(Exception):
    """The connection ended before the final dot, or with 421. `fresh_start`: to try once more costs no attempt."""

    def __init__(self, reason: str, stage: Stage, reply: Reply | None, fresh_start: bool) -> None:
        super().__init__(reason)
        self.reply = reply
        self.stage: Stage = stage
        self.fresh_start = fresh_start

    def verdict(self) -> SmtpError:
        """What it means to those who asked for the mail to be sent."""
        if self.reply:
            return Refused(self.reply.code, self.reply.text, self.stage)
        return NotDelivered(str(self))


@dataclass(slots=True)
class Sending:
    """One mail on its way: commands that are safe to write, the body, and until when (time of the loop)."""

    mail_command: bytes
    rcpt_command: bytes
    mail: bytes
    gate: Gate
    deadline: float
    permitted: bool = False

    @classmethod
    def of(cls, sender: str, recipient: str, mail: bytes, gate: Gate, deadline: float) -> "Sending":
        """Raises BadAddress before any command is written. An empty sender is the null return path."""
        sender = ascii_address(sender) if sender else ""
        mail_command = f"MAIL FROM:<{sender}>\r\n".encode("ascii")
        rcpt_command = f"RCPT TO:<{ascii_address(recipient)}>\r\n".encode("ascii")
        return cls(mail_command, rcpt_command, mail, gate, deadline)


class Connection(asyncio.Protocol):
    """A logged-in connection for one transaction at a time."""

    def __init__(self, transport: asyncio.Transport, *, pipelining: bool, max_size: int, reply_timeout: float) -> None:
        """Take the transport over. `max_size` 0: the server named none."""
        self.uses = 0
        self.idle_since = 0.0
        self.gone: str | None = None
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._transport = transport
        self._pipelining = pipelining
        self._max_size = max_size
        self._reply_timeout = reply_timeout
        self._buffer = b""
        self._text: list[bytes] = []
        self._replies: list[Reply] = []
        self._wanted = 0
        self._paused = False
        self._unreset = False
        self._waiter: asyncio.Future[None] | None = None
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        transport.set_protocol(self)
        # Nothing may be left in our own buffer when the dot is written: pause as soon as the kernel does not take all.
        # (Not 0: the TLS transport would take an empty buffer for a full one.)
        transport.set_write_buffer_limits(high=1, low=0)
        if transport.is_closing():  # perhaps before we became its protocol: then nobody will tell us
            self.gone = "the server closed the connection"
            self.closed.set_result(None)

    @property
    def usable(self) -> bool:
        """As far as one can know before writing to it."""
        return self.gone is None and not self._transport.is_closing()

    # ---- one transaction, in its order

    async def send(self, sending: Sending) -> str:
        """Carry the mail through to the server's 2xx and return its text.

        Raises Refused (the connection stays usable), Gone, NotDelivered, OutcomeUnknown, or what the gate raises.
        """
        self.uses += 1
        self._check_size(sending)
        await self._reset(sending.deadline)
        await self._envelope(sending)
        await self._body(sending)
        await self._permission(sending)
        self._raise_if_gone("DATA")
        self._write_dot(sending.gate)
        return await self._outcome(sending.deadline)

    def _check_size(self, sending: Sending) -> None:
        if 0 < self._max_size < len(sending.mail):
            raise Refused(552, f"mail of {len(sending.mail)} bytes, the server takes {self._max_size}", "MAIL")

    async def _reset(self, deadline: float) -> None:
        """A refused transaction may still be open at the server; a MAIL inside it would be an error."""
        if not self._unreset:
            return
        replies = await self._ask(b"RSET\r\n", 1, deadline)
        if not replies or replies[0].code != 250:
            self.end("the server did not accept RSET")
            raise self._lost("MAIL", replies)
        self._unreset = False

    async def _envelope(self, sending: Sending) -> None:
        """All three in one write where the server allows it, but every reply is read (RFC 2920, 3.1)."""
        commands = (sending.mail_command, sending.rcpt_command, b"DATA\r\n")
        if self._pipelining:
            replies = await self._ask(b"".join(commands), 3, sending.deadline)
        else:
            replies = await self._one_by_one(commands, sending.deadline)
        no = self._first_no(replies)
        if no is None:
            return
        self._unreset = True
        if len(replies) == 3 and replies[2].code == 354:
            await self._end_data_without_mail(replies, sending.deadline)
        raise no

    async def _one_by_one(self, commands: Sequence[bytes], deadline: float) -> list[Reply]:
        replies: list[Reply] = []
        for command, good in zip(commands, (2, 2, 3), strict=True):
            replies += await self._ask(command, 1, deadline)
            if not replies or replies[-1].code // 100 != good or self.gone:
                break
        return replies

    def _first_no(self, replies: Sequence[Reply]) -> Exception | None:
        for stage, reply, good in zip(_STAGES, replies, (2, 2, 3), strict=False):
            if reply.code == 421 or reply.code // 100 not in {good, 4, 5}:
                self.end(f"{reply.code or 'no SMTP reply:'} {reply.text}")
                return self._lost(stage, replies, reply if reply.code == 421 else None)
            if reply.code // 100 != good:
                return Refused(reply.code, reply.text, stage)
        return None if len(replies) == 3 and not self.gone else self._lost(_STAGES[min(len(replies), 2)], replies)

    async def _end_data_without_mail(self, replies: Sequence[Reply], deadline: float) -> None:
        """The server wants data although it refused something. A lone dot ends that if there is no recipient, as RFC
        2920 has it; if there is one he would get an empty mail, so hang up."""
        if replies[1].code // 100 == 2:
            self.end("the server took a recipient and refused the sender")
        else:
            await self._ask(b".\r\n", 1, deadline)

    async def _body(self, sending: Sending) -> None:
        mail = sending.mail.replace(b"\r\n.", b"\r\n..")
        if mail.startswith(b"."):
            mail = b"." + mail
        for start in range(0, len(mail), _CHUNK):
            self._raise_if_gone("DATA")
            self._transport.write(mail[start : start + _CHUNK])
            if self._paused:
                await self._wait(0, sending.deadline)

    async def _permission(self, sending: Sending) -> None:
        if sending.permitted:
            return
        if not sending.gate.limited:  # so no time-out need be set up
            await sending.gate.wait()
            sending.permitted = True
            return
        try:
            async with asyncio.timeout_at(sending.deadline):
                await sending.gate.wait()
        except TimeoutError:
            self.end("the time of this mail was over before it might be sent")
            raise NotDelivered(self.gone) from None
        sending.permitted = True

    def _write_dot(self, gate: Gate) -> None:
        gate.check()
        self._transport.write(b".\r\n")

    async def _outcome(self, deadline: float) -> str:
        await self._wait(1, deadline)
        replies = self._take(1)
        if not replies:
            raise OutcomeUnknown(f"after the final dot: {self.gone}")
        reply = replies[0]
        if reply.code // 100 == 2:
            return reply.text
        if reply.code == 421:
            self.end(f"421 {reply.text}")
            raise Gone(f"421 {reply.text}", "dot", reply, fresh_start=True)
        if reply.code // 100 not in {4, 5}:
            self.end("no SMTP reply")
            raise OutcomeUnknown(f"after the final dot: not a reply to it: {reply.code} {reply.text}")
        raise Refused(reply.code, reply.text, "dot")

    # ---- asking and waiting

    async def _ask(self, data: bytes, count: int, deadline: float) -> list[Reply]:
        """Write, then wait for so many replies. Fewer come back when the connection is gone, or after a 421."""
        if self.usable:
            self._transport.write(data)
            await self._wait(count, deadline)
        return self._take(count)

    async def _wait(self, wanted: int, deadline: float) -> None:
        """Until so many replies are here, or (0) until all is written, or the connection is gone."""
        self._wanted = wanted
        if self.gone:
            return
        self._until = min(deadline, self._loop.time() + self._reply_timeout)
        if self._timer is None or self._timer.when() > self._until:
            self._arm()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _arm(self) -> None:
        """One timer for many waits, which mostly end long before it: it looks how long it has to go on, if at all."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._until, self._look_at_clock)

    def _look_at_clock(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self._loop.time() >= self._until - _CLOCK_STEP:
            self._expire()
        else:
            self._arm()

    def _take(self, count: int) -> list[Reply]:
        replies, self._replies, self._wanted = self._replies, [], 0
        if len(replies) > count and not self.gone:
            self.end("the server sent more replies than it got commands")
        return replies[:count]

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    def _expire(self) -> None:
        self.end("the server did not answer in time" if self._wanted else "the server did not read in time")

    # ---- the end

    def end(self, reason: str) -> None:
        """Cut the connection; what is not written by now never will be. The first reason stays."""
        if self.gone is None:
            self.gone = clean(reason)
        self._transport.abort()
        self._wake()

    def quit(self) -> None:
        """Leave politely, without waiting for the answer."""
        if self.usable:
            self.gone = "closed"
            self._transport.write(b"QUIT\r\n")
            self._transport.close()

    def _raise_if_gone(self, stage: Stage) -> None:
        if not self.usable:
            replies = self._take(1)
            unasked = replies[0] if replies and replies[0].code // 100 in {4, 5} else None
            raise Gone(self.gone or "connection lost", stage, unasked, bool(unasked and unasked.code == 421))

    def _lost(self, stage: Stage, replies: Sequence[Reply], reply: Reply | None = None) -> Gone:
        nothing_accepted = self.uses > 1 and not any(r.code // 100 == 2 for r in replies)
        reason = f"{self.gone or 'connection lost'} (at {stage})"
        return Gone(reason, stage, reply, reply is not None or nothing_accepted)

    # ---- what the transport calls

    def data_received(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._text.append(line[4:].strip())
            if line[3:4] != b"-":
                code = int(line[:3]) if line[:3].isdigit() else 0
                self._replies.append(Reply(code, clean(b" ".join(self._text).decode("utf-8", "replace"))))
                self._text = []
        if len(self._buffer) + sum(map(len, self._text)) > _MAX_REPLY:
            self.end("the server sends replies without end")
        elif self._replies:
            self._judge_arrival()

    def _judge_arrival(self) -> None:
        if not self._wanted:
            last = self._replies[-1]
            self.end(f"the server spoke unasked: {last.code} {last.text}")
        elif len(self._replies) >= self._wanted or self._replies[-1].code == 421:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(f"connection lost: {exc}" if exc else "the server closed the connection")
        if self._timer is not None:
            self._timer.cancel()
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if not self._wanted:
            self._wake()


def clean(text: str) -> str:
    """A server's words for logs and rows: short, printable, without anybody's address."""
    if len(text) <= _MAX_TEXT and text.isprintable() and "@" not in text:
        return text
    printable = "".join(c if c.isprintable() else " " for c in text[:_MAX_TEXT])
    return _ADDRESS.sub("<address>", printable)
