"""Publishing to one partition with confirms; under a name exactly once, whatever happens to the connection.

A lost connection leaves the messages in flight unknown: stored or not. A named publisher asks the broker for the
highest id it stored, drops what is covered, and resends the rest in order under the old ids *before anything newer*;
the broker drops what it has already. It also drops a lower id behind a higher one, and confirms it: order is everything
(tests/fault/test_rabbitmq_publish.py::test_everything_is_stored_once_in_order_when_connections_are_cut_at_random).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from struct import Struct

from rstream import schema
from rstream.constants import Key

from streams._publishing import check_call
from streams._rabbitmq_connection import Backoff, Connection
from streams.errors import LogError, LogRefused, Unconfirmed
from streams.log import Partition

log = logging.getLogger(__name__)

# rstream does not split a batch at the broker's frame limit of 1 MiB (O-23,
# tests/fault/test_rabbitmq_publish.py::test_large_batch_arrives_when_it_exceeds_the_frame_limit).
SLICE_BYTES = 512 * 1024
SLICE_MESSAGES = 500
PUBLISHER_ID = 0


class _Session:
    """One connection's life as a publisher: what is sent on it and not yet confirmed."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.unconfirmed: dict[int, bytes] = {}
        self.moved = asyncio.Event()

    def listen(self) -> None:
        """Route the broker's frames here; the handlers run within the reader, so they neither wait nor raise."""
        client = self.connection.client
        client.add_handler(schema.PublishConfirm, self._on_confirm, name="confirm")
        client.add_handler(schema.PublishError, self._on_error, name="error")
        client.add_handler(schema.MetadataUpdate, self._on_metadata, name="metadata")
        self.connection.lost.add_done_callback(lambda _: self.moved.set())

    def _on_confirm(self, frame: schema.PublishConfirm) -> None:
        forget = self.unconfirmed.pop
        for publishing_id in frame.publishing_ids:
            forget(publishing_id, None)
        self.moved.set()

    def _on_error(self, frame: schema.PublishError) -> None:
        """A refusal of the broker says as little as a lost connection does: start anew and ask what is stored."""
        codes = sorted({error.response_code for error in frame.errors})
        self.connection.drop(f"messages refused with code {', '.join(map(str, codes))}")

    def _on_metadata(self, _: schema.MetadataUpdate) -> None:
        self.connection.drop("the stream has moved or is gone")

    async def send(self, messages: dict[int, bytes]) -> None:
        """Send in order of the ids, looking at the connection before every frame. Raises LogError once it is lost."""
        self.unconfirmed = messages
        for frame in _frames(list(messages.items())):
            await self.connection.tell(self.connection.write(frame), "publishing")
            await asyncio.sleep(0)  # let the reader take confirms in; writing alone never yields

    async def confirmed(self, timeout: float) -> None:
        """Return when nothing is unconfirmed. Raises LogError when lost, or when no confirm came for `timeout` s.

        Nobody tells about a confirm that will never come (tests/fault/test_rabbitmq_publish.py::
        test_everything_is_stored_once_when_confirms_are_swallowed).
        """
        while self.unconfirmed:
            self.connection.check()
            self.moved.clear()
            try:
                await asyncio.wait_for(self.moved.wait(), timeout)
            except TimeoutError:
                self.connection.drop(f"no confirm for {timeout:g} s")


class RabbitPublisher:
    """See `streams.log.Publisher`. Connected from the start.

    `reconnecting`: in the middle of a call, while it tries to get a lost connection back.
    """

    def __init__(
        self, connect: Callable[[str], Awaitable[Connection]], partition: Partition, name: str | None, timeout: float
    ) -> None:
        self.partition = partition
        self.name = name
        self.reconnecting = False
        self.closed = False
        self._connect = connect
        self._timeout = timeout
        self._turn = asyncio.Lock()
        self._last_id = 0
        self._session: _Session | None = None

    async def open(self) -> None:
        """Connect, and so learn early of a missing stream or permission. Raises LogError or LogRefused."""
        async with self._turn:
            await self._resume({})

    async def publish(self, messages: Sequence[bytes], ids: Sequence[int] | None = None) -> None:
        """See `streams.log.Publisher`."""
        numbered = self._number(messages, ids)
        async with self._turn:
            try:
                if self.name is None:
                    await self._publish_once(numbered)
                else:
                    await self._publish_until_stored(numbered)
            finally:
                self.reconnecting = False
                if numbered:  # given up in the middle: nothing of it may be taken for a part of the next call
                    self._drop("given up before all was confirmed")

    async def close(self) -> None:
        """See `streams.log.Publisher`."""
        self.closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.connection.close()

    def _number(self, messages: Sequence[bytes], ids: Sequence[int] | None) -> dict[int, bytes]:
        """Every message under its publishing id, in order. Raises ValueError before anything is sent."""
        check_call(messages, ids, named=self.name is not None)
        if self.name is None or ids is None:
            ids = range(self._last_id + 1, self._last_id + 1 + len(messages))
            self._last_id += len(messages)
        return dict(zip(ids, messages, strict=True))

    async def _publish_once(self, messages: dict[int, bytes]) -> None:
        session = await self._resume({})
        total = len(messages)
        try:
            await session.send(messages)
            await session.confirmed(self._timeout)
        except LogError as error:
            raise Unconfirmed(f"{len(messages)} of {total} messages to {self.partition.name}: {error}") from error

    async def _publish_until_stored(self, messages: dict[int, bytes]) -> None:
        backoff = Backoff()
        while messages:
            if self.closed:
                raise LogError(f"the publisher {self.name!r} of {self.partition.name} is closed")
            try:
                session = await self._resume(messages)
                await session.send(messages)
                await session.confirmed(self._timeout)
            except LogRefused:
                raise
            except LogError as error:
                self.reconnecting = True
                log.warning("%s: %s; %d messages to be resent", self.partition.name, error, len(messages))
                self._drop("to be replaced")
                await backoff.pause()

    async def _resume(self, messages: dict[int, bytes]) -> _Session:
        """The session that is open, or a new one.

        With a new one, what the broker has stored under the name leaves `messages`; the rest stays in order.

        An unknown name has the sequence 0, as has one whose highest id is 0: then nothing is left out, the broker knows
        (tests/fault/test_rabbitmq_publish.py::test_id_zero_is_stored_when_it_is_the_first_of_a_name).
        """
        if self._session is not None and not self._session.connection.lost.done():
            return self._session
        doing = f"publishing to {self.partition.name}"
        connection = await self._connect(f"publish {self.partition.name}")
        session = _Session(connection)
        session.listen()
        try:
            await connection.ask(
                connection.client.declare_publisher(self.partition.name, self.name, PUBLISHER_ID), doing
            )
            if self.name is not None and messages:
                last = await connection.ask(
                    connection.client.query_publisher_sequence(self.partition.name, self.name), doing
                )
                for publishing_id in [i for i in messages if i <= last and last > 0]:
                    del messages[publishing_id]
        except BaseException:
            connection.drop("not usable")
            raise
        self._session = session
        self.reconnecting = False
        return session

    def _drop(self, reason: str) -> None:
        if self._session is not None:
            self._session.connection.drop(reason)
            self._session = None


_FRAME_HEAD = Struct(">IHHBI")
"""Length of what follows, key, version, publisher, number of messages."""
_ENTRY_HEAD = Struct(">QI").pack
"""Publishing id and length of a message."""


def _frames(messages: list[tuple[int, bytes]]) -> Iterator[bytes]:
    """Frames of at most SLICE_MESSAGES messages and SLICE_BYTES bytes; a larger message goes alone.

    Written by hand, as rstream writes them but for a quarter of its time: it goes through every message three times.
    """
    part: list[bytes] = []
    size = 0
    for publishing_id, data in messages:
        if part and (len(part) == 2 * SLICE_MESSAGES or size + len(data) > SLICE_BYTES):
            yield _frame(part)
            part, size = [], 0
        part += (_ENTRY_HEAD(publishing_id, len(data)), data)
        size += len(data)
    if part:
        yield _frame(part)


def _frame(entries: list[bytes]) -> bytes:
    body = b"".join(entries)
    length = _FRAME_HEAD.size - 4 + len(body)
    return _FRAME_HEAD.pack(length, Key.Publish.value, 1, PUBLISHER_ID, len(entries) // 2) + body
