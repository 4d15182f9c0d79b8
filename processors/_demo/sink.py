"""A mail server that keeps what it gets and misbehaves on request: for `make demo` and the tests, never for real mail.

A mail is recorded the moment its final dot is read, before it is answered, so that a repeated delivery cannot hide. Run
by itself (`python -m processors._demo.sink --port 2525 --log mails.jsonl --script '[...]'`) it writes each mail to a
file as one line of JSON.
"""

import argparse
import asyncio
import contextlib
import json
import ssl
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, Literal, cast

from processors._demo.smtp_session import Session

Stage = Literal["connect", "ehlo", "starttls", "auth", "mail", "rcpt", "data", "body", "dot", "rset"]
Action = Literal["reply", "reset", "close", "freeze"]


@dataclass(frozen=True, slots=True)
class Mail:
    """One mail whose final dot was read; `at` in seconds since 1970, `raw` as sent, without dot-stuffing."""

    at: float
    sender: str
    recipients: tuple[str, ...]
    message_id: str
    raw: bytes

    def as_json(self) -> str:
        """One line of the log."""
        return json.dumps(asdict(self) | {"raw": self.raw.decode("latin-1")}, ensure_ascii=False)


@dataclass(slots=True)
class Rule:
    """What to do instead of a plain yes at one stage.

    `do`: `reply` (a code below 400 is a yes in other words; 421 also hangs up), `reset` (RST), `close`, or `freeze`
    (never answer). `recipient` is a pattern such as `late-*@example.com`; `times` and `skip` then count for each
    recipient by itself, else for all. At stage `dot` the mail is recorded unless the reply is 4xx or 5xx; at stage
    `body` the first bytes after 354 have come.
    """

    at: Stage
    do: Action = "reply"
    reply: str = ""
    delay: float = 0.0
    recipient: str | None = None
    times: int | None = None
    skip: int = 0
    seen: Counter[str] = field(default_factory=Counter)

    def applies(self, stage: Stage, recipients: Sequence[str]) -> bool:
        """Count this occasion, and say whether the rule is meant for it."""
        if stage != self.at:
            return False
        matching = [r for r in recipients if fnmatchcase(r, self.recipient)] if self.recipient else [""]
        if not matching:
            return False
        self.seen[matching[-1]] += 1
        number = self.seen[matching[-1]] - self.skip
        return number > 0 and (self.times is None or number <= self.times)


@dataclass
class Sink:
    """The server. Everything it saw is in `mails` and `commands` (verb, whether inside TLS)."""

    host: str = "127.0.0.1"
    port: int = 0
    pipelining: bool = True
    size: int | None = None
    smtputf8: bool = False
    starttls: ssl.SSLContext | None = None
    tls: ssl.SSLContext | None = None
    users: Mapping[str, str] | None = None
    idle_seconds: float | None = None
    drip: bool = False
    log: Path | None = None
    keep: bool = True
    mails: list[Mail] = field(default_factory=list)
    commands: list[tuple[str, bool]] = field(default_factory=list)
    connections: int = 0

    def __post_init__(self) -> None:
        self._rules: list[Rule] = []
        self._sessions: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._log: IO[str] | None = None
        self._news = asyncio.Condition()

    async def start(self) -> None:
        """Listen; a port of 0 becomes the one that the system gave. After `stop` on the same port again."""
        if self.log and not self._log:
            self._log = self.log.open("a", encoding="utf-8", buffering=1)
        self._server = await asyncio.start_server(self._serve, self.host, self.port, ssl=self.tls, backlog=1000)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections from now on and cut those that are open."""
        if self._server:
            self._server.close()
        await self.hang_up()
        if self._log:
            self._log.close()
            self._log = None

    async def hang_up(self) -> None:
        """Cut all open connections, as a restart of the server does."""
        sessions = list(self._sessions)
        for session in sessions:
            session.cancel()
        await asyncio.gather(*sessions, return_exceptions=True)

    @property
    def open_connections(self) -> int:
        """How many there are at the moment; `connections` counts all there ever were."""
        return len(self._sessions)

    def script(self, at: Stage, do: Action = "reply", **what: Any) -> Rule:
        """Add a rule (fields of `Rule`). Of several that apply the latest wins, so that it can override."""
        rule = Rule(at, do, **what)
        if rule.recipient and at not in {"rcpt", "data", "body", "dot"}:
            raise ValueError(f"the recipient is not known yet at stage {at}")
        self._rules.insert(0, rule)
        return rule

    def forget(self) -> None:
        """Drop all rules."""
        self._rules.clear()

    async def wait_for(self, count: int, seconds: float = 10.0) -> list[Mail]:
        """Return when so many mails are here. Raises TimeoutError."""
        async with asyncio.timeout(seconds), self._news:
            await self._news.wait_for(lambda: len(self.mails) >= count)
        return self.mails

    # ---- what a session asks and tells

    def rule(self, stage: Stage, recipients: Sequence[str] = ()) -> Rule | None:
        """The rule for this occasion, if there is one."""
        return next((rule for rule in self._rules if rule.applies(stage, recipients)), None)

    def command(self, verb: str, secure: bool) -> None:
        """Remember that it was sent."""
        if self.keep:
            self.commands.append((verb, secure))

    async def record(self, sender: str, recipients: Sequence[str], raw: bytes) -> None:
        """Keep a mail, in the file too: the line is written before the answer is."""
        mail = Mail(time.time(), sender, tuple(recipients), _message_id(raw), raw)
        if self._log:
            self._log.write(mail.as_json() + "\n")
        if self.keep:
            self.mails.append(mail)
            async with self._news:
                self._news.notify_all()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._sessions.add(task)
        self.connections += 1
        try:
            await Session(self, reader, writer).run()
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError, TimeoutError):
            pass
        except asyncio.CancelledError:
            pass  # hang_up; a cancelled task would be logged as an error by asyncio's streams
        finally:
            self._sessions.discard(task)
            writer.transport.abort()


def _message_id(raw: bytes) -> str:
    for line in raw.partition(b"\r\n\r\n")[0].split(b"\r\n"):
        if line[:11].lower() == b"message-id:":
            return line[11:].strip().decode("latin-1")
    return ""


async def _run(arguments: argparse.Namespace) -> None:
    sink = Sink(port=arguments.port, log=arguments.log, keep=False)
    for rule in json.loads(arguments.script):
        sink.script(**rule)
    await sink.start()
    sys.stdout.write(f"listening on {sink.host}:{sink.port}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m processors._demo.sink", description="A mail server that keeps what it gets."
    )
    parser.add_argument("--port", type=int, default=0, help="default: a free one, named on standard output")
    parser.add_argument("--log", type=Path, help="append each mail to this file as a line of JSON")
    parser.add_argument(
        "--script", default="[]", help="JSON array of rules: at, do, reply, delay, recipient, times, skip"
    )
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
