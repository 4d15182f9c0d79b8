"""An HTTP server that answers 201 at once and notes each POST: the event's id and the time, a line each.

    python -m bench.http_sink PORT FILE

A protocol of its own, because the two cores are shared with what is measured. The token is checked as a real receiver
does. Bodies end where Content-Length says.
"""

import asyncio
import os
import re
import sys
import time
from pathlib import Path
from typing import cast

import uvloop

from bench.places import HOST

TOKEN = "bench-token"
CREATED = b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
DENIED = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n"
_HEAD = re.compile(
    rb"(?i)\r\n(?:(?P<id>idempotency-key|x-event-id): (?P<event>\d+)|content-length: (?P<length>\d+)"
    rb"|(?P<authorization>authorization: bearer " + TOKEN.encode() + rb"))(?=\r\n)"
)


class Session(asyncio.Protocol):
    """One client, one request after the other."""

    def __init__(self, file: int) -> None:
        self._file, self._buffer = file, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self._one():
            pass

    def _one(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        event, length, known = b"0", 0, False
        for found in _HEAD.finditer(self._buffer, 0, end + 2):
            event = found["event"] or event
            length = int(found["length"] or length)
            known = known or found["authorization"] is not None
        if len(self._buffer) < end + 4 + length:
            return False
        self._buffer = self._buffer[end + 4 + length :]
        if known:
            os.write(self._file, b"%s %.6f\n" % (event, time.time()))
        self._transport.write(CREATED if known else DENIED)
        return True


async def serve(port: int, file: Path) -> None:
    """Serve until the process is ended."""
    number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    server = await asyncio.get_running_loop().create_server(lambda: Session(number), HOST, port, backlog=1000)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), Path(sys.argv[2])))
