"""The exact bounds of a stream: the broker's StreamStats command, which rstream lacks, and a look at the last chunk.

StreamStats names the offset of the *first* record of the last chunk; how many records that chunk holds is known only to
who reads it.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

from rstream import schema
from rstream.constants import Key, OffsetType, T

from streams._rabbitmq_connection import Connection, Inbox
from streams.errors import LogError
from streams.log import Bounds

SUBSCRIPTION_ID = 1
CHUNK_TIMEOUT = 5.0


class _StreamStatsKey:
    """Stands in for the member of rstream's enumeration of commands that is not there."""

    value = 28


# rstream finds the class of a frame by Key(number): this makes Key(28) answer.
_KEY = cast(Key, _StreamStatsKey())
cast(dict[int, Key], Key._value2member_map_).setdefault(_KEY.value, _KEY)


@dataclass
class _Statistic(schema.Struct):
    key: str = field(metadata={"type": T.string})
    value: int = field(metadata={"type": T.int64})


@dataclass
class _StreamStats(schema.Frame):
    key = _KEY
    correlation_id: int = field(metadata={"type": T.uint32})
    stream: str = field(metadata={"type": T.string})


@dataclass
class _StreamStatsResponse(schema.Frame, is_response=True):
    key = _KEY
    correlation_id: int = field(metadata={"type": T.uint32})
    response_code: int = field(metadata={"type": T.uint16})
    stats: list[_Statistic]


for _struct in (_Statistic, _StreamStats, _StreamStatsResponse):
    _struct.prepare()  # type: ignore[no-untyped-call]


class BoundsReader:
    """Asks for bounds on one connection, one stream at a time; remembers an end while the last chunk is the same."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._turn = asyncio.Lock()
        self._ends: dict[str, tuple[int, int]] = {}

    async def bounds(self, stream: str) -> Bounds:
        """First readable offset and next offset to be written; (0, 0) before the first record.

        The broker's notes on named publishers, one in each segment, and other clients' tracking take offsets as well.
        Where they follow the last record `next` is lower than what the next record will get, but above every record:
        else a reader at the end would seem to be behind. Raises LogError, LogRefused, StreamMissing.
        """
        async with self._turn:
            first, last_chunk = await self._stats(stream)
            if last_chunk < 0:
                return Bounds(0, 0)
            known_chunk, end = self._ends.get(stream, (-1, 0))
            # A stream made anew may have the same last chunk id, above all 0: its only chunk is always read.
            if known_chunk != last_chunk or first == last_chunk:
                chunk = await self._chunk(stream, schema.OffsetSpec.from_params(OffsetType.LAST, None))
                end = max(chunk.chunk_first_offset + chunk.num_records, first)
                self._ends[stream] = (last_chunk, end)
            return Bounds(first, end)

    async def written_at(self, stream: str, offset: int) -> int | None:
        """The time in ms since 1970 of the chunk with the first record at or after `offset`; None if there is none."""
        if offset >= (await self.bounds(stream)).next:
            return None  # the broker would send nothing until there is one
        async with self._turn:
            chunk = await self._chunk(stream, schema.OffsetSpec.from_params(OffsetType.OFFSET, offset))
        return chunk.timestamp

    async def _stats(self, stream: str) -> tuple[int, int]:
        client = self.connection.client
        request = _StreamStats(client._corr_id_seq.next(), stream)
        response = await self.connection.ask(
            client.sync_request(request, _StreamStatsResponse), f"asking for the bounds of {stream}"
        )
        stats = {statistic.key: statistic.value for statistic in response.stats}
        return stats["first_chunk_id"], stats["last_chunk_id"]

    async def _chunk(self, stream: str, where: schema.OffsetSpec) -> schema.Deliver:
        arrived: asyncio.Future[schema.Deliver] = asyncio.get_running_loop().create_future()
        client, ask = self.connection.client, self.connection.ask
        doing = f"reading a chunk of {stream}"
        client._frames[SUBSCRIPTION_ID] = Inbox(lambda chunk: None if arrived.done() else arrived.set_result(chunk))
        client.add_handler(schema.Deliver, _never_called, name=str(SUBSCRIPTION_ID))
        await ask(client.subscribe(stream, SUBSCRIPTION_ID, where, initial_credit=1), doing)
        try:
            return await ask(_within(arrived), doing)
        finally:
            await self._unsubscribe(doing)

    async def _unsubscribe(self, doing: str) -> None:
        """Free the id for the next question. Cut the connection if that cannot be made sure."""
        try:
            await self.connection.ask(self.connection.client.unsubscribe(SUBSCRIPTION_ID), doing)
        except BaseException:
            self.connection.drop("the subscription for one chunk is stuck")
            raise


async def _within(arrived: "asyncio.Future[schema.Deliver]") -> schema.Deliver:
    try:
        return await asyncio.wait_for(arrived, CHUNK_TIMEOUT)
    except TimeoutError:
        raise LogError(f"the chunk did not come within {CHUNK_TIMEOUT:g} s") from None


def _never_called(_: Any) -> None:
    """Registered because rstream fills the queues of those it has a handler for; the queue is our Inbox."""
