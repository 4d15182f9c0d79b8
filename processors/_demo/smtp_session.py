"""One connection to the demo's mail server: a strict, plain SMTP dialogue in which the sink's rules may interfere."""

import asyncio
import base64
import binascii
import re
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from processors._demo.sink import Rule, Sink, Stage

_PATH = re.compile(r"(?:FROM|TO):\s*<([^<>]*)>", re.IGNORECASE)
Handler = Callable[[str], Coroutine[Any, Any, None]]


class Closed(ConnectionError):
    """This side has hung up."""


class Session:
    """Reads commands one after another; what the client pipelines waits in the buffer."""

    def __init__(self, sink: "Sink", reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._sink = sink
        self._reader = reader
        self._writer = writer
        self._buffer = bytearray()
        self._secure = sink.tls is not None
        self._authenticated = sink.users is None
        self._sender: str | None = None
        self._recipients: list[str] = []
        self._handlers: dict[str, Handler] = {
            "EHLO": self._ehlo,
            "HELO": self._ehlo,
            "STARTTLS": self._starttls,
            "AUTH": self._auth,
            "MAIL": self._mail,
            "RCPT": self._rcpt,
            "DATA": self._data,
            "RSET": self._rset,
            "NOOP": self._noop,
            "QUIT": self._quit,
        }

    async def run(self) -> None:
        """Serve until one side hangs up."""
        if not await self._refused("connect"):
            await self._say("220 sink.example.com ESMTP")
        while True:
            line = await self._command()
            verb = line[:8].split(" ")[0].upper()
            self._sink.command(verb, self._secure)
            handler = self._handlers.get(verb)
            if handler:
                await handler(line)
            else:
                await self._say("502 5.5.1 unknown command")

    # ---- commands

    async def _ehlo(self, line: str) -> None:
        if await self._refused("ehlo"):
            return
        self._forget()
        offers = ["sink.example.com", *self._extensions()] if line[:4].upper() == "EHLO" else ["sink.example.com"]
        await self._say(*(f"250-{offer}" for offer in offers[:-1]), f"250 {offers[-1]}")

    def _extensions(self) -> list[str]:
        sink = self._sink
        offers = {
            "PIPELINING": sink.pipelining,
            f"SIZE {sink.size}": sink.size is not None,
            "SMTPUTF8": sink.smtputf8,
            "STARTTLS": sink.starttls is not None and not self._secure,
            "AUTH PLAIN LOGIN": sink.users is not None and (self._secure or sink.starttls is None),
            "8BITMIME": True,
        }
        return [offer for offer, offered in offers.items() if offered]

    async def _starttls(self, _line: str) -> None:
        if self._sink.starttls is None or self._secure:
            await self._say("502 5.5.1 not offered")
        elif not await self._refused("starttls"):
            await self._say("220 2.0.0 go ahead")
            self._buffer.clear()
            await self._writer.start_tls(self._sink.starttls)
            self._secure = True

    async def _auth(self, line: str) -> None:
        if await self._refused("auth"):
            return
        _, mechanism, *initial = line.split(" ")
        try:
            credentials = await (self._plain if mechanism.upper() == "PLAIN" else self._login)(initial)
        except (binascii.Error, ValueError):
            await self._say("501 5.5.2 not base64")
            return
        user, password = credentials
        self._authenticated = (self._sink.users or {}).get(user) == password
        await self._say("235 2.7.0 welcome" if self._authenticated else "535 5.7.8 wrong user or password")

    async def _plain(self, initial: list[str]) -> tuple[str, str]:
        answer = _unbase64(initial[0]) if initial else await self._challenge("")
        _, user, password = answer.split("\0")
        return user, password

    async def _login(self, initial: list[str]) -> tuple[str, str]:
        user = _unbase64(initial[0]) if initial else await self._challenge("Username:")
        return user, await self._challenge("Password:")

    async def _challenge(self, text: str) -> str:
        await self._say(f"334 {base64.b64encode(text.encode()).decode()}")
        return _unbase64(await self._command())

    async def _mail(self, line: str) -> None:
        path = _PATH.search(line)
        if await self._refused("mail"):
            return
        if not self._authenticated:
            await self._say("530 5.7.0 log in first")
        elif self._sender is not None:
            await self._say("503 5.5.1 a transaction is open")
        elif path is None or not (line.isascii() or self._sink.smtputf8):
            await self._say("501 5.1.7 bad address")
        else:
            self._sender = path[1]
            await self._say("250 2.1.0 ok")

    async def _rcpt(self, line: str) -> None:
        path = _PATH.search(line)
        if await self._refused("rcpt", path[1] if path else ""):
            return
        if self._sender is None:
            await self._say("503 5.5.1 MAIL first")
        elif path is None or not (line.isascii() or self._sink.smtputf8):
            await self._say("501 5.1.3 bad address")
        else:
            self._recipients.append(path[1])
            await self._say("250 2.1.5 ok")

    async def _data(self, _line: str) -> None:
        # A rule with a yes of its own (354) makes the server take data that nobody is to get, as some servers do.
        forced = self._sink.rule("data", self._recipients)
        if forced:
            await self._carry_out(forced)
            if not forced.reply.startswith("3"):
                return
        elif not self._recipients:
            await self._say("554 5.5.1 no valid recipients" if self._sender is not None else "503 5.5.1 MAIL first")
            return
        else:
            await self._say("354 go ahead")
        await self._receive()

    async def _receive(self) -> None:
        if not self._buffer:
            await self._read()
        if rule := self._sink.rule("body", self._recipients):
            await self._carry_out(rule)
        self._buffer[:0] = b"\r\n"  # so that a dot alone is the end too
        received = await self._until(b"\r\n.\r\n")
        await self._finish(received[:-3].replace(b"\r\n.", b"\r\n")[2:])

    async def _finish(self, raw: bytes) -> None:
        rule = self._sink.rule("dot", self._recipients)
        refused = not self._recipients or (rule is not None and rule.reply[:1] in {"4", "5"})
        too_large = self._sink.size is not None and len(raw) > self._sink.size
        sender, recipients = self._sender or "", self._recipients
        self._forget()
        if not refused and not too_large:
            await self._sink.record(sender, recipients, raw)
        if rule:
            await self._carry_out(rule)
        if too_large:
            await self._say("552 5.3.4 too large")
        elif not recipients:
            await self._say("554 5.5.1 no valid recipients")
        elif not (rule and rule.reply):
            await self._say("250 2.0.0 ok: kept")

    async def _rset(self, _line: str) -> None:
        if not await self._refused("rset"):
            self._forget()
            await self._say("250 2.0.0 ok")

    async def _noop(self, _line: str) -> None:
        await self._say("250 2.0.0 ok")

    async def _quit(self, _line: str) -> None:
        await self._say("221 2.0.0 bye")
        self._writer.close()
        raise Closed

    def _forget(self) -> None:
        self._sender = None
        self._recipients = []

    # ---- rules

    async def _refused(self, stage: "Stage", *recipients: str) -> bool:
        """Whether a rule has answered in our place."""
        rule = self._sink.rule(stage, recipients)
        if rule:
            await self._carry_out(rule)
        return rule is not None and rule.reply != ""

    async def _carry_out(self, rule: "Rule") -> None:
        await asyncio.sleep(rule.delay)
        if rule.do == "freeze":
            await asyncio.Event().wait()
        if rule.do == "reset":
            linger = struct.pack("ii", 1, 0)
            self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        if rule.do in {"reset", "close"}:
            raise Closed
        if rule.reply:
            await self._say(*rule.reply.split("\n"))

    # ---- bytes

    async def _say(self, *lines: str) -> None:
        data = "".join(f"{line}\r\n" for line in lines).encode()
        pieces = [data[i : i + 1] for i in range(len(data))] if self._sink.drip else [data]
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()
            if self._sink.drip:
                await asyncio.sleep(0.001)
        if lines[-1].startswith("421"):
            self._writer.close()
            raise Closed

    async def _command(self) -> str:
        idle = self._sink.idle_seconds if self._sender is None else None
        try:
            async with asyncio.timeout(idle):
                line = await self._until(b"\r\n")
        except TimeoutError:
            await self._say("421 4.4.2 idle for too long")
            raise
        return line[:-2].decode("utf-8", "replace")

    async def _until(self, end: bytes) -> bytes:
        seen = 0
        while (at := self._buffer.find(end, seen)) < 0:
            seen = max(0, len(self._buffer) - len(end))
            await self._read()
        taken = bytes(self._buffer[: at + len(end)])
        del self._buffer[: at + len(end)]
        return taken

    async def _read(self) -> None:
        data = await self._reader.read(65536)
        if not data:
            raise Closed
        self._buffer += data


def _unbase64(text: str) -> str:
    return base64.b64decode(text, validate=True).decode()
