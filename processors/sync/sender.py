"""Executes a described request: the only file that knows the HTTP client, and the place where its rules live once.

A total time-out over all phases; no redirects; certificates verified; of an answer's body at most 2 kB are read.
Connections are kept. A kept one that the server has closed meanwhile breaks before any byte of an answer comes: then,
and only then, the request goes out once more, on a new connection, as the same attempt with the same Idempotency-Key.

It speaks httpx (Request, Response, transports); httpx's own connection pool costs 3 ms of CPU for each POST, so the
transport is aiohttp's (docs/decisions/0016-httpx-on-aiohttp.md). Not here: what becomes of the event.
"""

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import aiohttp
import httpx

from processors.sync.answer import Answer, SendFailed
from processors.sync.request import RequestDescription

__all__ = ["AiohttpTransport", "Answer", "SendFailed", "Sender"]

MAX_BODY = 2048
"""Bytes of an answer that are read; a connection with more on it is closed."""

KEEPALIVE_SECONDS = 30.0


class Gate(Protocol):
    """The part of `streams.processor.Gate` that the sender needs."""

    async def wait(self) -> None: ...

    def check(self) -> None: ...


@dataclass(slots=True)
class _Progress:
    """How far one exchange came. `reused`: on a kept connection; `written`: the request has gone out."""

    reused: bool = False
    written: bool = False


class Sender:
    """Sends requests over connections that it keeps, to any number of systems."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport
        self._urls: dict[str, httpx.URL] = {}

    async def send(self, what: RequestDescription, headers: dict[str, str], gate: Gate) -> Answer:
        """Send it, with these headers besides its own. Raises SendFailed, and LeaseOver when the gate does."""
        progress = _Progress()
        try:
            async with asyncio.timeout(what.timeout):
                response = await self._exchange(what, headers, gate, progress)
        except TimeoutError:
            raise SendFailed(
                f"timeout: no whole answer within {what.timeout:g} s", "timeout", progress.written
            ) from None
        except httpx.HTTPError as error:
            raise _failed(error, progress) from error
        return _answer(response)

    async def close(self) -> None:
        """Close the kept connections."""
        await self._transport.aclose()

    async def _exchange(
        self, what: RequestDescription, headers: dict[str, str], gate: Gate, progress: _Progress
    ) -> httpx.Response:
        request = self._request(what, headers, progress)
        await gate.wait()
        gate.check()
        try:
            return await self._transport.handle_async_request(request)
        except httpx.ReadError:
            if not progress.reused:
                raise
        progress.reused = progress.written = False
        request.extensions["fresh"] = True
        gate.check()
        return await self._transport.handle_async_request(request)

    def _request(self, what: RequestDescription, headers: dict[str, str], progress: _Progress) -> httpx.Request:
        url = self._urls.get(what.url)
        if url is None:
            url = self._urls[what.url] = _url(what.url)
        return httpx.Request(
            what.method,
            url,
            headers={**what.headers, **headers, "Accept-Encoding": "identity"},
            content=what.body,
            extensions={"progress": progress},
        )


def _url(text: str) -> httpx.URL:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise SendFailed(f"the URL cannot be used: {error}", "url", False) from error
    if url.scheme not in {"http", "https"} or not url.host:
        raise SendFailed("the URL is not http:// or https:// with a host", "url", False)
    return url


def _answer(response: httpx.Response) -> Answer:
    text = response.content.decode("utf-8", "replace")
    headers = response.headers
    return Answer(response.status_code, text, headers.get("location"), headers.get("retry-after"))


def _failed(error: httpx.HTTPError, progress: _Progress) -> SendFailed:
    cause = error.__cause__ or error
    if isinstance(cause, aiohttp.ClientSSLError | ssl.SSLError):
        return SendFailed(f"TLS failed: {cause}", "tls", False)
    if isinstance(error, httpx.ConnectError):
        return SendFailed(f"cannot connect: {cause}", "connect", False)
    if isinstance(error, httpx.RemoteProtocolError):
        return SendFailed(f"the answer is not HTTP: {type(cause).__name__}", "protocol", progress.written)
    return SendFailed(f"the connection broke: {cause}", "disconnected", progress.written)


# ---- aiohttp below httpx


class AiohttpTransport(httpx.AsyncBaseTransport):
    """httpx's requests and responses over aiohttp's connections. A response holds at most MAX_BODY bytes of its body.

    Not the package httpx-aiohttp: it tells a connection that broke from one that was never made by no error of its own
    (it calls both a ConnectTimeout), and not whether it was kept. That difference is what the one repeat rests on.
    """

    def __init__(self, ca_file: Path | None = None) -> None:
        self._ca_file = ca_file
        self._kept: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises ReadError when the connection broke before any byte of an answer came; else other httpx errors."""
        progress = request.extensions.get("progress") or _Progress()
        if request.extensions.get("fresh"):
            async with self._session(force_close=True) as session:
                return await _exchange(session, request, progress)
        if self._kept is None:
            self._kept = self._session(force_close=False)
        return await _exchange(self._kept, request, progress)

    async def aclose(self) -> None:
        """Close the kept connections."""
        if self._kept is not None:
            await self._kept.close()

    def _session(self, force_close: bool) -> aiohttp.ClientSession:
        more: dict[str, Any] = {} if force_close else {"keepalive_timeout": KEEPALIVE_SECONDS}
        # How many requests are under way to one system is bounded by its lane.
        connector = aiohttp.TCPConnector(limit=0, ssl=self._tls(), force_close=force_close, **more)
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            auto_decompress=False,
            trace_configs=[_TRACE],
        )

    def _tls(self) -> ssl.SSLContext | bool:
        return True if self._ca_file is None else ssl.create_default_context(cafile=self._ca_file)


async def _exchange(session: aiohttp.ClientSession, request: httpx.Request, progress: _Progress) -> httpx.Response:
    headers = {name.decode("ascii"): value.decode("latin-1") for name, value in request.headers.raw}
    try:
        async with session.request(
            request.method,
            str(request.url),
            headers=headers,
            data=request.content,
            allow_redirects=False,
            trace_request_ctx=progress,
        ) as answer:
            body = await _beginning(answer.content)
            return httpx.Response(answer.status, headers=answer.raw_headers, content=body, request=request)
    except aiohttp.ClientConnectorError as error:
        raise httpx.ConnectError(str(error), request=request) from error
    except aiohttp.ServerDisconnectedError as error:
        # its message is a text only where not a single byte had come
        kind = httpx.ReadError if isinstance(error.message, str) else httpx.RemoteProtocolError
        raise kind("the connection was closed", request=request) from error
    except aiohttp.ClientOSError as error:
        raise httpx.ReadError(str(error), request=request) from error
    except (aiohttp.ClientError, ValueError) as error:
        raise httpx.RemoteProtocolError(type(error).__name__, request=request) from error


async def _beginning(content: aiohttp.StreamReader) -> bytes:
    """The first bytes of a body. What is longer is left unread, and the connection is closed."""
    body = await content.read(MAX_BODY)
    while len(body) < MAX_BODY and not content.at_eof():
        body += await content.read(MAX_BODY - len(body))
    return body


async def _reused(_session: object, context: SimpleNamespace, _params: object) -> None:
    context.trace_request_ctx.reused = True


async def _written(_session: object, context: SimpleNamespace, _params: object) -> None:
    context.trace_request_ctx.written = True


def _trace() -> aiohttp.TraceConfig:
    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(_reused)
    config.on_request_headers_sent.append(_written)
    return config


_TRACE = _trace()
