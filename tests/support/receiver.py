"""An HTTP server that a test scripts: what each request is answered, when, or that the connection just ends.

Real sockets and raw bytes, so that half an answer, a redirect or an endless body are what they are.
"""

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Request:
    """One request as it came; header names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    connection: int
    """Which connection it came on, counted from 1."""
    at: float
    """When its last byte had come, in the loop's time."""

    @property
    def event(self) -> int:
        """The id of the event that it is about."""
        return int(self.headers["idempotency-key"])


@dataclass(frozen=True)
class Reply:
    """What a request is answered. `raw` in place of all else is written as it is; then the connection ends."""

    status: int = 201
    body: bytes = b"{}"
    headers: Mapping[str, str] = field(default_factory=dict)
    delay: float = 0.0
    raw: bytes | None = None
    reset: bool = False
    """End the connection by a reset, after `raw` if there is any."""

    def encode(self) -> bytes:
        """The bytes of an ordinary answer."""
        head = {"Content-Type": "application/json", "Content-Length": str(len(self.body)), **self.headers}
        lines = [f"HTTP/1.1 {self.status} Answer", *(f"{name}: {value}" for name, value in head.items())]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + self.body


Script = Callable[[Request], Reply]


class Receiver:
    """Listens for the time of the block. `script` decides; a request is noted when its last byte has come."""

    def __init__(self, script: Script | None = None, *, tls: ssl.SSLContext | None = None) -> None:
        self.script: Script = script or (lambda request: Reply())
        self.requests: list[Request] = []
        self.may_answer = asyncio.Event()
        """Cleared, every answer waits."""
        self.may_answer.set()
        self.connections = 0
        self.running = 0
        self.most_running = 0
        self._tls = tls
        self._port = 0
        self._server: asyncio.Server | None = None
        self._open: dict[int, asyncio.StreamWriter] = {}
        self._handlers: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where it listens, or listened."""
        return f"{'https' if self._tls else 'http'}://{'localhost' if self._tls else HOST}:{self._port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, on the same port as before."""
        self._server = await asyncio.start_server(self._handle, HOST, self._port, ssl=self._tls, backlog=500)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections from now on, and end those that are open."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        self.drop()
        for handler in list(self._handlers):
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    def drop(self) -> None:
        """End every open connection, as a server does with those that are idle."""
        for writer in self._open.values():
            writer.close()

    def counts(self) -> Counter[int]:
        """How many requests there were of each event."""
        return Counter(request.event for request in self.requests)

    def of(self, event: int) -> list[Request]:
        """The requests of one event, in order."""
        return [request for request in self.requests if request.event == event]

    # ---- one connection

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)
        self.connections += 1
        number = self.connections
        self._open[number] = writer
        try:
            while (request := await _read(reader, number)) is not None:
                self.requests.append(request)
                if not await self._answer(request, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            del self._open[number]
            writer.close()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        reply = self.script(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(reply.delay)
            await self.may_answer.wait()
        finally:
            self.running -= 1
        ends = reply.raw is not None or reply.reset
        writer.write((reply.raw or b"") if ends else reply.encode())
        await writer.drain()
        if reply.reset:
            writer.transport.abort()
        return not ends


async def _read(reader: asyncio.StreamReader, number: int) -> Request | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    first, *lines = head.rstrip("\r\n").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    method, path, _ = first.split(" ", 2)
    return Request(method, path, headers, body, number, asyncio.get_running_loop().time())
