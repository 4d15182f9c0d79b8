"""Reading one partition as one of a group of which the broker lets one be active, on a connection of its own.

One connection per subscription, because rstream puts every chunk of a connection into the queue of each of its
subscriptions. Three parties meet here: the reader (rstream's task: chunks and updates, in the broker's order, never
waiting), the supervisor (our task: asks the owner, answers the broker, gives credit, reconnects) and whoever takes.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import repeat

from rstream import schema
from rstream.constants import OffsetType

from streams._rabbitmq_connection import Backoff, Connection, Inbox, describe
from streams.errors import LogError
from streams.log import Owner, Partition, Record

log = logging.getLogger(__name__)

SUBSCRIPTION_ID = 0
HANDLER = str(SUBSCRIPTION_ID)
# Chunks under way or buffered. A chunk holds up to some thousand records and may be megabytes: this is the memory
# bound, and the back-pressure, for a chunk's credit returns only when its last record is taken
# (tests/fault/test_rabbitmq_consume.py::test_buffer_stays_bounded_when_nobody_takes).
CREDIT = 4
# Of a backlog that was written quickly the broker makes chunks of thousands of records: two of them are plenty.
CREDIT_OF_LARGE = 2
LARGE_BYTES = 128 * 1024
# A connection that lived so long was no failed attempt.
HEALTHY_SECONDS = 10.0

_new_record = partial(tuple.__new__, Record)  # Record.__new__ is Python and would double the cost of a record


class Buffer:
    """The chunks of the present activation, given out as records whose offsets only rise. Knows no socket."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[int, schema.Deliver]] = deque()
        self._records: list[Record] = []
        self._taken = 0
        self._next: int | None = None

    @property
    def readable(self) -> bool:
        """Whether there is at least one record."""
        return bool(self._chunks or self._records)

    def start(self, position: int) -> None:
        """Accept what is at or behind `position`."""
        self._next = position

    def stop(self) -> int:
        """Drop everything and accept nothing. Returns how many chunks were dropped."""
        dropped = len(self._chunks) + bool(self._records)
        self._chunks.clear()
        self._records = []
        self._next = None
        return dropped

    def add(self, chunk: schema.Deliver) -> bool:
        """Keep the chunk if it holds a record that is wanted; the broker begins with the chunk around a position."""
        end = chunk.chunk_first_offset + chunk.num_records
        if self._next is None or end <= self._next:
            return False
        self._chunks.append((max(self._next - chunk.chunk_first_offset, 0), chunk))
        self._next = end
        return True

    def take(self, limit: int) -> tuple[list[Record], int]:
        """Up to `limit` records, and how many chunks were used up by that. Raises what a broken chunk raises."""
        taken: list[Record] = []
        finished = 0
        while len(taken) < limit and self.readable:
            if not self._records:
                self._unpack()
            part = self._records[self._taken : self._taken + limit - len(taken)]
            taken += part
            self._taken += len(part)
            if self._taken == len(self._records):
                self._records = []
                finished += 1
        return taken, finished

    def _unpack(self) -> None:
        skip, chunk = self._chunks.popleft()
        offsets = range(chunk.chunk_first_offset, chunk.chunk_first_offset + chunk.num_records)
        messages = chunk.get_messages()
        self._records = list(map(_new_record, zip(offsets, repeat(chunk.timestamp), messages, strict=False)))
        self._taken = skip


class RabbitSubscription:
    """See `streams.log.Subscription`.

    Delivers from the position that the owner names, never from before it. That the position is not beyond the end of
    the stream is for the owner to check, in `activate`: there the broker attaches to the end as it is a moment later,
    so that records may be passed by (those below the position are dropped here). The end itself is a good position.
    """

    def __init__(
        self, connect: Callable[[str], Awaitable[Connection]], partition: Partition, group: str, owner: Owner
    ) -> None:
        self.partition = partition
        self.closed = False
        self._connect = connect
        self._group = group
        self._owner = owner
        self._buffer = Buffer()
        self._readable = asyncio.Event()
        self._updates: deque[schema.ConsumerUpdateResponse] = deque()
        self._owed = 0
        self._chunk_bytes = LARGE_BYTES
        self._wake = asyncio.Event()
        self._restarting = False
        self._connection: Connection | None = None
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """False while the connection is lost."""
        return self.closed or (self._connection is not None and not self._connection.lost.done())

    async def open(self) -> None:
        """Subscribe for the first time, and stay subscribed from then on. Raises LogError or LogRefused."""
        connection = await self._subscribe()
        self._supervisor = asyncio.create_task(self._supervise(connection), name=f"subscription {self.partition.name}")

    async def ready(self) -> None:
        """See `streams.log.Subscription`."""
        await self._readable.wait()

    def take(self, limit: int) -> list[Record]:
        """See `streams.log.Subscription`."""
        try:
            records, finished = self._buffer.take(limit)
        except Exception as error:  # foreign bytes; a chunk that cannot be read must not be skipped
            self._give_up(f"a chunk cannot be unpacked: {describe(error)}")
            return []
        if finished:
            self._owed += finished
            self._wake.set()
        if not self._buffer.readable:
            self._readable.clear()
        return records

    async def restart(self) -> None:
        """See `streams.log.Subscription`. Another member of the group may become the active one."""
        self._stop_delivery()
        self._restarting = True
        self._wake.set()

    async def close(self) -> None:
        """See `streams.log.Subscription`."""
        self.closed = True
        self._stop_delivery()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        if self._connection is not None:
            await self._connection.close()

    # ---- the supervisor

    async def _supervise(self, connection: Connection) -> None:
        """Serve, and subscribe anew whenever the connection is lost: for ever, with growing pauses.

        rstream's own recovery gives up after some attempts, forgets the credit, and starts at an offset that is not the
        owner's (O-21, O-26, tests/fault/test_rabbitmq_consume.py). A refusal at this point may pass as well, say a
        password being changed; `connected` stays false meanwhile.
        """
        backoff = Backoff()
        while True:
            since = asyncio.get_running_loop().time()
            try:
                await self._serve(connection)
            except LogError as error:
                log.warning("%s: %s", self.partition.name, error)
            except Exception:  # whatever it is: a supervisor that dies leaves a partition that nobody reads
                log.exception("%s: serving the subscription failed", self.partition.name)
            if self._restarting or asyncio.get_running_loop().time() - since > HEALTHY_SECONDS:
                backoff.reset()
            await connection.close()
            connection = await self._resubscribe(backoff)

    async def _resubscribe(self, backoff: Backoff) -> Connection:
        if not self._restarting:
            await backoff.pause()
        self._restarting = False
        while True:
            try:
                return await self._subscribe()
            except Exception as error:
                log.warning("%s: %s", self.partition.name, describe(error))
                await backoff.pause()

    async def _serve(self, connection: Connection) -> None:
        """Answer updates and give credit until a restart is asked for. Raises LogError when the connection is lost."""
        while not self._restarting:
            await self._wake.wait()
            self._wake.clear()
            while self._updates and not connection.lost.done():
                await self._answer(connection, self._updates.popleft())
            connection.check()
            if due := self._due_credit():
                self._owed -= due
                await connection.tell(connection.client.credit(SUBSCRIPTION_ID, due), "giving credit")

    def _due_credit(self) -> int:
        """What is owed to the broker, less what it gets only while chunks are small."""
        kept = CREDIT - CREDIT_OF_LARGE if self._chunk_bytes >= LARGE_BYTES else 0
        return max(0, self._owed - kept)

    async def _answer(self, connection: Connection, update: schema.ConsumerUpdateResponse) -> None:
        """Let the owner finish or begin, then answer: the broker waits for it before anybody becomes active.

        Without an answer the partition would be stuck for the whole group, so there is always one, or the connection
        ends and the broker chooses anew
        (tests/fault/test_rabbitmq_handover.py::test_group_moves_on_when_an_owner_raises). The owner may take long: it
        keeps neither heartbeats nor the reader waiting, for this is not the reader's task
        (::test_connection_survives_when_the_owner_takes_longer_than_the_heartbeat); only after a minute without answer
        does the broker close the connection, and this ends as any lost connection does.
        """
        position = 0
        try:
            if update.active:
                position = await self._owner.activate(self.partition)
            else:
                await self._owner.deactivate(self.partition)
        except Exception:
            log.exception("%s: the owner of the subscription failed", self.partition.name)
            self._give_up("the owner failed")
            return
        connection.check()
        # An update that came meanwhile says that we are to be inactive again: deliver nothing for this one.
        if update.active and not self._updates and not self._restarting:
            self._buffer.start(position)
        answer = schema.OffsetSpecification(OffsetType.OFFSET, position)
        await connection.tell(connection.client.consumer_update(update.correlation_id, answer), "answering")

    async def _subscribe(self) -> Connection:
        connection = await self._connect(f"subscribe {self.partition.name} {self._group}")
        client = connection.client
        self._forget_connection()
        client._frames[SUBSCRIPTION_ID] = Inbox(self._on_chunk)
        client.add_handler(schema.Deliver, _never_called, name=HANDLER)
        client.add_handler(schema.ConsumerUpdateResponse, self._on_update, name=HANDLER)
        client.add_handler(schema.MetadataUpdate, partial(_on_metadata, connection), name=HANDLER)
        try:
            # The offset is a form only: delivery starts with the answer to the first update.
            request = client.subscribe(
                self.partition.name,
                SUBSCRIPTION_ID,
                schema.OffsetSpec.from_params(OffsetType.NEXT, None),
                CREDIT_OF_LARGE,
                self._properties(),
            )
            await connection.ask(request, f"subscribing to {self.partition.name}")
        except BaseException:
            connection.drop("not subscribed")
            raise
        self._connection = connection
        connection.lost.add_done_callback(self._on_lost)
        self._wake.set()
        return connection

    def _properties(self) -> dict[str, str]:
        """Membership of the group. The flag must be the string "true"; a plain stream must not name a super stream."""
        properties = {"single-active-consumer": "true", "name": self._group}
        if self.partition.name != self.partition.stream:
            properties["super-stream"] = self.partition.stream
        return properties

    # ---- called by the reader: never wait, never raise

    def _on_chunk(self, chunk: schema.Deliver) -> None:
        self._chunk_bytes = chunk.data_length
        if self._owed:
            self._wake.set()
        if self._buffer.add(chunk):
            self._readable.set()
        else:  # a credit that does not return is lost for good, and with the last one comes silence
            self._owed += 1
            self._wake.set()

    def _on_update(self, update: schema.ConsumerUpdateResponse) -> None:
        """Stop handing out at this very moment, whichever way it goes; what is older must not be read any more.

        rstream goes on delivering what it has queued, for seconds, while the next member reads the same records
        (tests/fault/test_rabbitmq_handover.py::test_nothing_is_handed_out_while_the_owner_finishes).
        """
        self._stop_delivery()
        self._updates.append(update)
        self._wake.set()

    def _on_lost(self, _: "asyncio.Future[str]") -> None:
        """Another member may be active any moment now: hand out nothing more."""
        self._stop_delivery()
        self._wake.set()

    def _stop_delivery(self) -> None:
        self._owed += self._buffer.stop()
        self._readable.clear()
        if self._connection is not None:
            self._wake.set()

    def _forget_connection(self) -> None:
        self._stop_delivery()
        self._updates.clear()
        self._owed = CREDIT - CREDIT_OF_LARGE

    def _give_up(self, reason: str) -> None:
        log.error("%s: %s", self.partition.name, reason)
        if self._connection is not None:
            self._connection.drop(reason)


def _on_metadata(connection: Connection, _: schema.MetadataUpdate) -> None:
    """The stream has another leader, or was deleted: either way the broker has ended the subscription."""
    connection.drop("the stream has moved or is gone")


def _never_called(_: schema.Deliver) -> None:
    """Registered because rstream fills the queues of those it has a handler for; the queue is our Inbox."""
