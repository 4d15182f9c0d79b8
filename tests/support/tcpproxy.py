"""A TCP proxy within the test's own loop, to do to connections what networks do to them."""

import asyncio
import socket
import struct
from types import TracebackType
from typing import Self


class Quota:
    """How many bytes a connection carries to the target before it is held back: so a fault meets work half done."""

    def __init__(self) -> None:
        self._limit: int | None = None
        self._lifted = asyncio.Event()

    def set(self, limit: int) -> None:
        """Hold back whatever a connection is to carry beyond this."""
        self._limit = limit
        self._lifted.clear()

    def lift(self) -> None:
        """Let everything pass again."""
        self._limit = None
        self._lifted.set()

    async def admits(self, carried: int) -> None:
        """Wait until so many bytes may have been carried."""
        if self._limit is not None and carried > self._limit:
            await self._lifted.wait()


class _Link:
    """One connection through the proxy: two sockets, and in each direction a gate that may be shut."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter, quota: "Quota") -> None:
        self.near = near
        self.far = far
        self.quota = quota
        self.up = asyncio.Event()
        self.down = asyncio.Event()
        self.up.set()
        self.down.set()
        self.carried_up = 0

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
        try:
            while data := await reader.read(65536):
                await gate.wait()
                if gate is self.up:
                    self.carried_up += len(data)
                    await self.quota.admits(self.carried_up)
                writer.write(data)
                await writer.drain()
            writer.close()
        except OSError:
            writer.close()

    def reset(self) -> None:
        """End both sides by RST, as a firewall or a crashed host does."""
        for writer in (self.near, self.far):
            connection = writer.get_extra_info("socket")
            if connection is not None and connection.fileno() >= 0:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class TcpProxy:
    """Listens on a free port of this machine and forwards to `port`; use it as an async context manager."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self.refusing = False
        """While true, a new connection is reset at once."""
        self.quota = Quota()
        self._target = port
        self._links: set[_Link] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._serving: set[asyncio.Task[None] | None] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*(task for task in self._serving if task))

    @property
    def connections(self) -> int:
        """How many connections go through at the moment."""
        return len(self._links)

    def cut(self) -> int:
        """Reset every connection. Returns how many there were."""
        links, self._links = self._links, set()
        for link in links:
            link.reset()
        return len(links)

    def fin(self) -> None:
        """Close every connection on both sides in an orderly way."""
        for link in self._links:
            link.near.close()
            link.far.close()

    def freeze(self, *, up: bool = True, down: bool = True) -> None:
        """Hold back what the present connections carry to (`up`) and from (`down`) the target; new ones flow."""
        for link in self._links:
            if up:
                link.up.clear()
            if down:
                link.down.clear()

    def thaw(self) -> None:
        """Let everything flow again."""
        for link in self._links:
            link.up.set()
            link.down.set()

    async def _serve(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        self._serving.add(asyncio.current_task())
        if self.refusing:
            near.transport.abort()
        else:
            await self._forward(reader, near)
        self._serving.discard(asyncio.current_task())

    async def _forward(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        try:
            far_reader, far = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            near.transport.abort()
            return
        link = _Link(near, far, self.quota)
        self._links.add(link)
        pumps = {
            asyncio.create_task(link.pump(reader, far, link.up)),
            asyncio.create_task(link.pump(far_reader, near, link.down)),
        }
        self._pumps |= pumps
        await asyncio.wait(pumps)
        self._pumps -= pumps
        self._links.discard(link)
