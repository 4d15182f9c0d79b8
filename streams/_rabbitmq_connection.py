"""One connection to the broker that says when it is lost, and the errors of rstream in our own words.

Built on `rstream.client.Client`, the layer that speaks the protocol. rstream's `Consumer` and `Producer` are left alone
on purpose: they reconnect by themselves, which loses confirmed messages (newer publishing ids overtake the resent ones)
and replays or skips parts of a stream. Here a lost connection stays lost; whoever uses it decides what follows. And
every connection goes to the host of LOG_URL, never to the address that the broker advertises, so that it works behind a
load balancer or proxy; a node that cannot serve a stream refuses, and the next attempt may meet another one.
"""

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Callable, Coroutine
from struct import Struct, unpack_from
from typing import Any, TypeVar

import rstream.connection
from rstream import exceptions, schema
from rstream.client import Client
from rstream.encoding import decode_frame

from streams._rabbitmq_url import Address
from streams.errors import LogError, LogRefused, StreamMissing, StreamsError

T = TypeVar("T")

log = logging.getLogger(__name__)

# rstream reads 256 bytes at a time from the socket; with 64 KiB a consumer is about three times as fast
# (tests/fault/test_rabbitmq_consume.py::test_big_reads_are_in_force_when_a_connection_is_open).
rstream.connection.CHUNK_SIZE = 64 * 1024

# At level DEBUG rstream writes every frame to the log: the password of the login and the addresses in the bodies
# (tests/fault/test_rabbitmq_refusals.py::test_password_stays_out_of_the_logs_when_everything_is_logged).
logging.getLogger("rstream").setLevel(logging.WARNING)

FRAME_MAX = 1024 * 1024
MISSED_HEARTBEATS = 2.5
CLOSE_TIMEOUT = 3.0

_FATAL = (
    exceptions.AuthenticationFailure,
    exceptions.SASLAuthenticationFailureLoopback,
    exceptions.SASLMechanismNotSupported,
    exceptions.VirtualHostAccessFailure,
    exceptions.AccessRefused,
    exceptions.PreconditionFailed,
    ssl.SSLCertVerificationError,
)


def describe(error: BaseException) -> str:
    """The type and, if there is one, the text: rstream raises the broker's errors with an empty text."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def translate(error: Exception, doing: str) -> StreamsError:
    """The same failure as a LogError (try again) or LogRefused (a person must act). Never holds the password."""
    if isinstance(error, (LogError, LogRefused)):
        return error
    text = f"{doing}: {describe(error)}"
    if isinstance(error, exceptions.StreamDoesNotExist):
        return StreamMissing(text)
    return LogRefused(text) if isinstance(error, _FATAL) else LogError(text)


class Backoff:
    """Growing pauses between attempts, with jitter so that many processes do not come back in step."""

    def __init__(self, first: float = 0.2, most: float = 5.0) -> None:
        self._first = first
        self._most = most
        self._next = first

    def reset(self) -> None:
        """Begin with the shortest pause again."""
        self._next = self._first

    async def pause(self) -> None:
        """Sleep between half of and the whole pause, and double the next one."""
        pause, self._next = self._next, min(self._next * 2, self._most)
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # spreads load, guards nothing


class Inbox(asyncio.Queue[schema.Deliver]):
    """Stands where rstream keeps the queue of a subscription, and hands each chunk over within the reader.

    A queue of rstream could hold chunks of a former activation that nobody can tell from those of the present one; here
    chunks and consumer updates are seen in the order in which the broker sent them. `on_chunk` must not raise: rstream
    would log the frame, bodies and all, and go on with the next one.
    """

    def __init__(self, on_chunk: Callable[[schema.Deliver], None]) -> None:
        super().__init__()
        self._on_chunk = on_chunk

    async def put(self, item: schema.Deliver) -> None:
        self._on_chunk(item)


class Connection:
    """A logged-in connection. `lost` is done, with the reason, from the moment it can no longer be used."""

    def __init__(self, client: Client, label: str) -> None:
        self.client = client
        self.label = label
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watchdog: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, address: Address, label: str, heartbeat: int, ssl_context: ssl.SSLContext | None
    ) -> "Connection":
        """Connect and log in; `label` names it in the broker's management. Raises LogError or LogRefused."""
        client = Client(
            address.host,
            address.port,
            ssl_context=ssl_context,
            frame_max=FRAME_MAX,
            heartbeat=heartbeat,
            connection_name=label,
            connection_closed_handler=_ignore,
        )
        connection = cls(client, label)
        doing = f"connecting to {address}"
        try:
            await client.start()
            _read_quickly(client)
            connection._watch_reader()
            await connection.ask(client.authenticate(address.vhost, address.username, address.password), doing)
            connection._watchdog = asyncio.create_task(connection._watch_heartbeats(), name=f"watchdog {label}")
        except BaseException as error:
            connection.drop("not opened")
            if isinstance(error, Exception):
                raise translate(error, doing) from None
            raise
        return connection

    def check(self) -> None:
        """Raise LogError when the connection is lost."""
        if self.lost.done():
            raise LogError(f"{self.label}: connection lost ({self.lost.result()})")

    async def ask(self, request: Coroutine[Any, Any, T], doing: str) -> T:
        """Await a request to the broker, no longer than the connection lives; errors come translated.

        rstream does not fail its waiting requests when the connection closes, each would last its 10 s.
        """
        if self.lost.done():
            request.close()
        self.check()
        task = asyncio.ensure_future(request)
        try:
            either: set[asyncio.Future[Any]] = {task, self.lost}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        except Exception as error:
            raise translate(error, doing) from error
        finally:
            task.cancel()
        raise LogError(f"{doing}: connection lost ({self.lost.result()})")

    async def tell(self, message: Coroutine[Any, Any, None], doing: str) -> None:
        """Send what the broker does not answer. Raises LogError when the connection is lost, or found lost by this.

        rstream writes to a socket that it knows is dead without a word; to one that uvloop has just closed the write
        fails with a RuntimeError that rstream does not expect (tests/fault/test_rabbitmq_publish.py, on uvloop).
        """
        if self.lost.done():
            message.close()
        self.check()
        try:
            await message
        except Exception as error:
            self.drop(describe(error))
            raise LogError(f"{doing}: {describe(error)}") from error

    async def write(self, frame: bytes) -> None:
        """Write a frame that is encoded already; for `tell`."""
        if self.client._conn is None:
            raise ConnectionResetError("closed already")
        await self.client._conn._write_frame_raw(frame)

    def drop(self, reason: str) -> None:
        """Declare the connection lost and cut it without ceremony. Nothing waits for a peer that may be gone."""
        if not self.lost.done():
            self.lost.set_result(reason)
        if self._watchdog is not None:
            self._watchdog.cancel()
        for task in self.client._tasks.values():
            task.cancel()
        # rstream does not close its socket when the other side has closed first.
        if self.client._conn is not None and self.client._conn._writer is not None:
            self.client._conn._writer.transport.abort()

    async def close(self) -> None:
        """Say goodbye if the broker still listens, and let go. Never raises, never lasts longer than CLOSE_TIMEOUT.

        rstream's own close sleeps, may raise what the reader died of, and waits for a silent broker
        (tests/fault/test_rabbitmq_halfopen.py::test_close_is_bounded_when_the_broker_is_silent).
        """
        try:
            if not self.lost.done():
                self.lost.set_result("closed here")
                goodbye = schema.Close(self.client._corr_id_seq.next(), code=1, reason="OK")
                await asyncio.wait_for(self.client.sync_request(goodbye, schema.CloseResponse), CLOSE_TIMEOUT)
        except Exception as error:  # whatever it was, the connection is given up
            log.debug("%s: closing: %s", self.label, describe(error))
        finally:
            self.drop("closed here")

    def _watch_reader(self) -> None:
        """Every end of a connection ends rstream's reader: closed, reset, or dead of a frame it cannot decode.

        Of the last one rstream tells nobody and `is_connection_alive()` stays true
        (tests/fault/test_rabbitmq_consume.py::test_reader_that_died_is_replaced_when_a_frame_cannot_be_decoded).
        """

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            self.drop("closed by the other side" if error is None else f"reader died of {describe(error)}")

        self.client._tasks["listener"].add_done_callback(ended)

    async def _watch_heartbeats(self) -> None:
        """Notice the connection whose other side has vanished: no error ever comes from it, only silence.

        rstream logs missing heartbeats and goes on. Its `_last_heartbeat` is the time of the last frame of any kind. A
        second look after a moment lets a loop that was blocked itself read first what has arrived meanwhile
        (tests/fault/test_rabbitmq_halfopen.py::test_consumer_moves_on_when_its_connection_is_half_open).
        """
        beat = self.client._heartbeat
        if beat <= 0:
            log.warning("%s: the broker has heartbeats turned off; a vanished broker goes unnoticed", self.label)
            return
        while True:
            await asyncio.sleep(beat / 2)
            if self._silence() > MISSED_HEARTBEATS * beat:
                await asyncio.sleep(0.2)
                if self._silence() > MISSED_HEARTBEATS * beat:
                    break
        self.drop(f"silent for {self._silence():.0f} s")

    def _silence(self) -> float:
        return time.monotonic() - self.client._last_heartbeat


_CONFIRM, _DELIVER = b"\x00\x03\x00\x01", b"\x00\x08\x00\x01"
"""Key and version of the frames that come in numbers, or large."""
_CONFIRM_HEAD = Struct(">4xBI")
"""Publisher and number of publishing ids."""
_DELIVER_HEAD = Struct(">4xBbbHIqQQIIII")
"""The fields of `schema.Deliver` but the last, which is all that follows."""


def _read_quickly(client: Client) -> None:
    """Have it decode by `_decode`, where rstream reads ids one by one and copies a chunk twice more."""
    connection: Any = client._conn

    async def read_frame() -> schema.Frame:
        return _decode(await connection._read_frame_raw())

    connection.read_frame = read_frame


def _decode(data: bytearray) -> schema.Frame:
    """As rstream's `decode_frame`, which judges whatever is not exactly one of the two."""
    if data[:4] == _CONFIRM and len(data) >= _CONFIRM_HEAD.size:
        publisher, count = _CONFIRM_HEAD.unpack_from(data)
        if len(data) == _CONFIRM_HEAD.size + 8 * count:
            return schema.PublishConfirm(publisher, list(unpack_from(f">{count}Q", data, _CONFIRM_HEAD.size)))
    if data[:4] == _DELIVER and len(data) >= _DELIVER_HEAD.size:
        fields: list[Any] = [*_DELIVER_HEAD.unpack_from(data), bytes(memoryview(data)[_DELIVER_HEAD.size :])]
        return schema.Deliver(*fields)
    return decode_frame(bytes(data))


def _ignore(_: object) -> None:
    """What rstream calls when a connection closes; with none it logs a traceback. The reader's end tells us more."""
