"""A mail server that takes everything, answers after a fixed delay, and notes each mail as its final dot is read.

    python -m bench.sink PORT DELAY_MS [FILE]

smtp-sink cannot do either: its delays are whole seconds. One line per mail goes to FILE, the recipient's address,
written before the reply is: a mail counts from the moment from which a real server could have delivered it.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import cast

import uvloop

from bench.places import HOST

HELLO = b"250-sink\r\n250-PIPELINING\r\n250-8BITMIME\r\n250 SIZE 10240000\r\n"
END = b"\r\n.\r\n"


class Session(asyncio.Protocol):
    """One client. Replies keep the order of the commands because a client waits for the reply to a mail."""

    def __init__(self, delay: float, file: int | None) -> None:
        self._delay, self._file = delay, file
        self._buffer = b""
        self._recipient = b""
        self._in_mail = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(b"220 sink ESMTP\r\n")

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self._mail_ended() if self._in_mail else self._command():
            pass

    def _mail_ended(self) -> bool:
        at = self._buffer.find(END)
        if at < 0:
            return False
        self._buffer, self._in_mail = self._buffer[at + len(END) :], False
        if self._file is not None:
            os.write(self._file, self._recipient + b"\n")
        if self._delay:
            asyncio.get_running_loop().call_later(self._delay, self._answer, b"250 queued\r\n")
        else:
            self._answer(b"250 queued\r\n")
        return True

    def _command(self) -> bool:
        line, found, rest = self._buffer.partition(b"\r\n")
        if not found:
            return False
        self._buffer = rest
        match line[:4].upper():
            case b"EHLO":
                self._answer(HELLO)
            case b"DATA":
                self._in_mail = True
                self._buffer = b"\r\n" + rest  # so that a mail without any line has the same end
                self._answer(b"354 go on\r\n")
            case b"QUIT":
                self._answer(b"221 bye\r\n")
                self._transport.close()
            case _:
                if line[:4].upper() == b"RCPT":
                    self._recipient = line[line.find(b"<") + 1 : line.find(b">")]
                self._answer(b"250 ok\r\n")
        return True

    def _answer(self, reply: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(reply)


async def serve(port: int, delay: float, file: Path | None) -> None:
    """Serve until the process is ended."""
    number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if file else None
    server = await asyncio.get_running_loop().create_server(lambda: Session(delay, number), HOST, port, backlog=1000)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1000, Path(sys.argv[3]) if len(sys.argv) > 3 else None))
