"""Executes a described request: the only file that knows the HTTP client, and the place where its rules live once.

A total time-out over all phases; no redirects; certificates verified; of an answer's body only a beginning is read.
Connections are kept. A kept one that the server has closed meanwhile breaks before any byte of an answer comes: then,
and only then, the request goes out once more, on a new connection, as the same attempt with the same Idempotency-Key.
A request that may not be repeated goes out on a new connection, once.

aiohttp, and not httpx: docs/decisions/0019-aiohttp-as-the-http-client.md. Not here: what becomes of the row.
"""

import asyncio
import ssl
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

import aiohttp

from processors._http.answer import Answer, SendFailed
from processors._http.request import RequestDescription

__all__ = ["Answer", "SendFailed", "Sender"]

KEEPALIVE_SECONDS = 30.0


class Gate(Protocol):
    """The part of `streams.processor.Gate` that the sender needs."""

    async def wait(self) -> None: ...

    def check(self) -> None: ...


@dataclass(slots=True)
class _Progress:
    """How far one exchange came. Once it is connected, the request may have arrived."""

    connected: bool = False
    reused: bool = False


class _Broken(Exception):
    """The connection broke before any byte of an answer came."""


class Sender:
    """Sends requests over connections that it keeps, to any number of systems. How many at once is not its business."""

    def __init__(self, ca_file: Path | None = None) -> None:
        """`ca_file` replaces the machine's own certificates."""
        self._ca_file = ca_file
        self._kept: aiohttp.ClientSession | None = None

    async def send(self, what: RequestDescription, headers: Mapping[str, str], gate: Gate) -> Answer:
        """Send it, with these headers besides its own. Raises SendFailed, and LeaseOver when the gate does."""
        progress = _Progress()
        _UNDER_WAY.set(progress)
        try:
            async with asyncio.timeout(what.timeout):
                return await self._once_or_again(what, {**what.headers, **headers}, gate, progress)
        except TimeoutError:
            text = f"timeout: no whole answer within {what.timeout:g} s"
            raise SendFailed(text, "timeout", progress.connected) from None
        except _Broken as error:
            raise SendFailed(f"the connection broke: {error}", "disconnected", True) from error
        except (aiohttp.ClientError, ValueError) as error:
            raise _failed(error, progress) from error

    async def close(self) -> None:
        """Close the kept connections."""
        if self._kept is not None:
            await self._kept.close()

    async def _once_or_again(
        self, what: RequestDescription, headers: dict[str, str], gate: Gate, progress: _Progress
    ) -> Answer:
        await gate.wait()
        gate.check()
        if not what.repeatable:
            async with self._session() as fresh:
                return await _exchange(fresh, what, headers)
        if self._kept is None:
            self._kept = self._session()
        try:
            return await _exchange(self._kept, what, headers)
        except _Broken:
            if not progress.reused:
                raise
        gate.check()
        async with self._session() as fresh:
            return await _exchange(fresh, what, headers)

    def _session(self) -> aiohttp.ClientSession:
        tls = True if self._ca_file is None else ssl.create_default_context(cafile=self._ca_file)
        # How many requests are under way to one system is bounded by its lane.
        connector = _Connector(limit=0, ssl=tls, keepalive_timeout=KEEPALIVE_SECONDS)
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        )


async def _exchange(session: aiohttp.ClientSession, what: RequestDescription, headers: dict[str, str]) -> Answer:
    try:
        async with session.request(
            what.method,
            what.url,
            headers=headers,
            data=what.body or None,
            allow_redirects=False,
        ) as answer:
            text = (await _beginning(answer.content, what.max_body)).decode("utf-8", "replace")
            return Answer(answer.status, text, answer.headers.get("Location"), answer.headers.get("Retry-After"))
    except aiohttp.ClientConnectorError:
        raise
    except aiohttp.ServerDisconnectedError as error:
        if not isinstance(error.message, str):  # a part of an answer had come
            raise
        raise _Broken(error.message) from error
    except aiohttp.ClientOSError as error:
        raise _Broken(str(error)) from error


async def _beginning(content: aiohttp.StreamReader, most: int) -> bytes:
    """The first bytes of a body. What is longer is left unread, and the connection is closed."""
    body = await content.read(most)
    while len(body) < most and not content.at_eof():
        body += await content.read(most - len(body))
    return body


def _failed(error: Exception, progress: _Progress) -> SendFailed:
    """Why there is no answer; `ClientOSError` and a closed connection have become _Broken before."""
    if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
        return SendFailed("the URL cannot be used: it is not http:// or https:// with a host", "url", False)
    if isinstance(error, aiohttp.ClientSSLError):
        return SendFailed(f"TLS failed: {error}", "tls", False)
    if isinstance(error, aiohttp.ClientConnectorError):
        return SendFailed(f"cannot connect: {error}", "connect", False)
    return SendFailed(f"the answer is not HTTP: {type(error).__name__}", "protocol", progress.connected)


# ---- whether a connection is new


class _Connector(aiohttp.TCPConnector):
    """Notes in the progress of an exchange what its connection is. aiohttp's tracing says it too, for 20 us each."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._seen = WeakSet[object]()

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[aiohttp.tracing.Trace], timeout: aiohttp.ClientTimeout
    ) -> aiohttp.connector.Connection:
        connection, progress = await super().connect(req, traces, timeout), _UNDER_WAY.get()
        progress.connected, progress.reused = True, connection.protocol in self._seen
        self._seen.add(connection.protocol)
        return connection


_UNDER_WAY: ContextVar[_Progress] = ContextVar("exchange")
