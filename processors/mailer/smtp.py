"""Connections to the mail server: opened by aiosmtplib (only this file knows it), kept, lent to one mail at a time.

A fault of the set-up (`SetupFault`) concerns every mail alike; what concerns one mail is told by the errors of
`transaction.py`. Not here: when to try again, and how many mails per second.
"""

import asyncio
import ssl
from dataclasses import dataclass, field
from typing import Literal, cast

import aiosmtplib

from processors.mailer.transaction import (
    Connection,
    Gate,
    Gone,
    NotDelivered,
    OutcomeUnknown,
    Refused,
    Sending,
    SmtpError,
    clean,
)
from streams.errors import BadSettings

__all__ = ["Gate", "NotDelivered", "OutcomeUnknown", "Pool", "Refused", "SetupFault", "SmtpConfig", "SmtpError"]

_QUIT_SECONDS = 2.0

FaultKind = Literal["connect", "greeting", "tls", "starttls", "auth", "timeout"]


@dataclass(frozen=True, slots=True)
class SmtpConfig:
    """The server and how to reach it; all times in seconds.

    `connect_timeout` bounds the whole set-up (TCP, TLS, greeting, login), `reply_timeout` each single wait for the
    server. A connection that was idle for `idle_seconds` is replaced before it is used again: a firewall may have
    forgotten it silently.
    """

    host: str
    port: int
    security: Literal["none", "starttls", "tls"] = "starttls"
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    verify: bool = True
    local_hostname: str | None = None
    connect_timeout: float = 10.0
    reply_timeout: float = 15.0
    idle_seconds: float = 60.0


class SetupFault(SmtpError):
    """No connection could be made ready for mails. `kind` is equal for all that fail alike."""

    def __init__(self, kind: FaultKind, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind: FaultKind = kind
        self.text = text


class Pool:
    """At most `size` connections, opened when needed; the one that was used last is used first."""

    def __init__(self, config: SmtpConfig, size: int) -> None:
        """Raises BadSettings when the file of certificates cannot be read."""
        self._config = config
        self._tls = _tls_context(config)
        self._idle: list[Connection] = []
        self._slots = asyncio.Semaphore(size)
        self._closed = False

    async def send(self, sender: str, recipient: str, mail: bytes, gate: Gate, deadline: float) -> str:
        """Send one mail and return the text of the server's 2xx. `deadline`: time of the loop, bounds everything.

        `mail` ends in CRLF and has no other line ends. Raises BadAddress (a ValueError) before any command; SetupFault,
        Refused, NotDelivered, and whatever the gate raises: nothing is delivered; OutcomeUnknown: nobody knows.
        Cancelled from outside it cuts the connection; if `gate.check` had passed, the outcome is unknown.
        """
        sending = Sending.of(sender, recipient, mail, gate, deadline)
        await self._acquire_slot(deadline)
        try:
            return await self._send_at_most_twice(sending)
        finally:
            self._slots.release()

    async def probe(self) -> None:
        """Connect, secure, log in, leave. Raises SetupFault."""
        connection = await self._open(asyncio.get_running_loop().time() + self._config.connect_timeout)
        connection.quit()

    async def close(self) -> None:
        """Say QUIT on what is idle; at most two seconds. A connection in use is closed when its mail is done."""
        self._closed = True
        leaving = self._idle
        self._idle = []
        for connection in leaving:
            connection.quit()
        if leaving:
            await asyncio.wait([connection.closed for connection in leaving], timeout=_QUIT_SECONDS)
        for connection in leaving:
            connection.end("closed")

    async def _acquire_slot(self, deadline: float) -> None:
        if not self._slots.locked():  # nothing to wait for, so no time-out to set up
            await self._slots.acquire()
            return
        try:
            async with asyncio.timeout_at(deadline):
                await self._slots.acquire()
        except TimeoutError:
            raise NotDelivered("the time of this mail was over before a connection was free") from None

    async def _send_at_most_twice(self, sending: Sending) -> str:
        try:
            return await self._send_on(self._take_idle() or await self._open(sending.deadline), sending)
        except Gone as gone:
            if not gone.fresh_start or asyncio.get_running_loop().time() >= sending.deadline:
                raise gone.verdict() from None
        # An idle connection that had died, or a 421: no fault of this mail, so that it costs no attempt.
        try:
            return await self._send_on(await self._open(sending.deadline), sending)
        except Gone as gone:
            raise gone.verdict() from None

    async def _send_on(self, connection: Connection, sending: Sending) -> str:
        try:
            return await connection.send(sending)
        except (Refused, Gone):
            raise
        except BaseException:
            # The transaction is at some point that cannot be taken back in words (inside DATA there is no RSET).
            connection.end("given up")
            raise
        finally:
            self._give_back(connection)

    def _take_idle(self) -> Connection | None:
        too_old = asyncio.get_running_loop().time() - self._config.idle_seconds
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since > too_old:
                return connection
            connection.quit()
        return None

    def _give_back(self, connection: Connection) -> None:
        connection.idle_since = asyncio.get_running_loop().time()
        if self._closed:
            connection.quit()
        elif connection.usable:
            self._idle.append(connection)

    async def _open(self, deadline: float) -> Connection:
        """A connection that is ready for mails; never one without the security that was asked for."""
        client = self._client()
        step: FaultKind = "connect"
        until = min(deadline, asyncio.get_running_loop().time() + self._config.connect_timeout)
        try:
            async with asyncio.timeout_at(until):
                await client.connect()
                step = "greeting"
                await client.ehlo()
                if self._config.security == "starttls":
                    step = "starttls"
                    await client.starttls()
                    await client.ehlo()
                if self._config.username is not None:
                    step = "auth"
                    await client.login(self._config.username, self._config.password or "")
            return self._hand_over(client)
        except (aiosmtplib.SMTPException, OSError) as error:
            client.close()
            raise _setup_fault(step, error) from error
        except BaseException:
            client.close()
            raise

    def _client(self) -> aiosmtplib.SMTP:
        config = self._config
        return aiosmtplib.SMTP(
            hostname=config.host,
            port=config.port,
            local_hostname=config.local_hostname,
            timeout=config.connect_timeout,
            use_tls=config.security == "tls",
            start_tls=False,
            tls_context=self._tls,
        )

    def _hand_over(self, client: aiosmtplib.SMTP) -> Connection:
        if client.transport is None:
            raise aiosmtplib.SMTPServerDisconnected("Connection lost")
        size = client.esmtp_extensions.get("size", "")
        return Connection(
            cast(asyncio.Transport, client.transport),
            pipelining=client.supports_extension("pipelining"),
            max_size=int(size) if size.isdecimal() else 0,
            reply_timeout=self._config.reply_timeout,
        )


def _tls_context(config: SmtpConfig) -> ssl.SSLContext | None:
    if config.security == "none":
        return None
    try:
        context = ssl.create_default_context(cafile=config.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise BadSettings(f"the file of certificates for SMTP, {config.ca_file}, cannot be read: {error}") from error
    if not config.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _setup_fault(step: FaultKind, error: Exception) -> SetupFault:
    if isinstance(error, aiosmtplib.SMTPResponseException):
        text = f"{error.code} {error.message}"
    else:
        text = str(error) or type(error).__name__
    kind = step
    if _is_tls(error):
        kind = "tls"
    elif isinstance(error, TimeoutError):
        kind = "timeout"
        text = f"{step} took too long"
    elif isinstance(error, aiosmtplib.SMTPConnectResponseError):
        kind = "greeting"
    return SetupFault(kind, clean(text))


def _is_tls(error: BaseException | None) -> bool:
    """aiosmtplib wraps a failed handshake as a failed connection when TLS is there from the start."""
    return error is not None and (isinstance(error, ssl.SSLError) or _is_tls(error.__cause__))
