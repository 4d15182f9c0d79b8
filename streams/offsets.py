"""The position of a processor in a partition: a row of `processor_offsets`, moved only in the transaction that settles.

The statements are text because they ride in the transactions of a turn. `epoch` is raised by a replay: who has read
the old one matches no row any more, claims nothing more and loads anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import orjson

from streams.database import Dialect
from streams.log import Bounds, Partition
from streams.sql import Sql, now, recordset


@dataclass(frozen=True, slots=True)
class Position:
    """The row as read. `last_timestamp_ms`: chunk time of the record before `next_offset`, null after a replay."""

    next_offset: int
    epoch: int
    paused: bool
    paused_reason: str | None
    halted_reason: str | None
    starts: int
    last_timestamp_ms: int | None


class Advance(NamedTuple):
    """Move one partition from `was` to `to`; `record_id` and `record_ms` are those of the record before `to`.

    `starts` is what the counter of starts without progress is set to.
    """

    processor: str
    stream: str
    part: int
    was: int
    to: int
    era: int
    record_id: str
    record_ms: int
    starts: int = 0


async def load(sql: Sql, processor: str, partition: Partition) -> Position | None:
    """The saved position, None before the first start."""
    rows = await sql.fetch(_LOAD, processor, partition.stream, partition.index)
    return Position(**dict(rows[0])) if rows else None


async def create(sql: Sql, processor: str, partition: Partition, first: int) -> None:
    """Begin at `first`; harmless when another replica was quicker.

    A pause holds for the processor, so a partition that begins after it begins paused, for the same reason.
    """
    text = _CREATE.format(now=now(sql.dialect))
    await sql.fetch(text, processor, partition.stream, partition.index, first)


async def advance(sql: Sql, advances: Sequence[Advance]) -> bool:
    """Move each; False when one of them was not where we left it (another epoch or owner)."""
    if not advances:
        return True
    moves = orjson.dumps([advance._asdict() for advance in advances]).decode()
    return len(await sql.fetch(advance_text(sql.dialect, "$1"), moves)) == len(advances)


def advance_text(dialect: Dialect, parameter: str) -> str:
    """Rule 14 as an UPDATE ... RETURNING, for those who send it along with other statements."""
    columns = {"processor": "text", "stream": "text", "part": "int", "was": "bigint", "to": "bigint", "era": "int"}
    columns |= {"record_id": "text", "record_ms": "bigint", "starts": "int"}
    return f"""
        UPDATE processor_offsets AS o SET next_offset = y."to", last_id = y.record_id, last_timestamp_ms = y.record_ms,
            starts = y.starts, updated_at = {now(dialect)}
        FROM {recordset(dialect, parameter, "y", columns)}
        WHERE o.processor = y.processor AND o.stream = y.stream AND o.partition = y.part
            AND o.next_offset = y.was AND o.epoch = y.era
        RETURNING epoch"""


async def begin(sql: Sql, processor: str, partition: Partition) -> int:
    """Raise the counter of starts without progress and return it: it survives a process that dies in decode or plan."""
    rows = await sql.fetch(_BEGIN, processor, partition.stream, partition.index)
    return int(rows[0]["starts"]) if rows else 1


async def begun(sql: Sql, processor: str, partition: Partition, starts: int) -> None:
    """Set the counter back to `starts`."""
    await sql.fetch(_BEGUN, processor, partition.stream, partition.index, starts)


async def halt(sql: Sql, processor: str, partition: Partition, reason: str | None, epoch: int) -> None:
    """Write down why this partition does not read (None: it reads again), unless a replay came in between."""
    await sql.fetch(_HALT, processor, partition.stream, partition.index, reason, epoch)


async def replay(sql: Sql, processor: str, partition: Partition, to: int) -> None:
    """Let the processor read on from `to`, wherever it is: a new epoch, and no memory of what came before."""
    text = _REPLAY.format(now=now(sql.dialect))
    await sql.fetch(text, processor, partition.stream, partition.index, to)


async def observe(sql: Sql, processor: str, partition: Partition, bounds: Bounds) -> None:
    """Write the end of the partition as seen now, so that SQL can show the lag."""
    text = _OBSERVE.format(now=now(sql.dialect))
    await sql.fetch(text, processor, partition.stream, partition.index, bounds.next)


_PAUSE = """EXISTS (SELECT 1 FROM processor_offsets WHERE processor = $1 AND paused),
        (SELECT max(paused_reason) FROM processor_offsets WHERE processor = $1 AND paused)"""
_REPLAY = f"""INSERT INTO processor_offsets
    (processor, stream, partition, next_offset, epoch, paused, paused_reason, starts, updated_at)
    VALUES ($1, $2, $3, $4, 1, {_PAUSE}, 0, {{now}})
    ON CONFLICT (processor, stream, partition) DO UPDATE SET next_offset = excluded.next_offset,
        epoch = processor_offsets.epoch + 1, halted_reason = NULL, last_id = NULL, last_timestamp_ms = NULL,
        starts = 0, updated_at = excluded.updated_at"""
_KEY = "processor = $1 AND stream = $2 AND partition = $3"
_LOAD = f"""SELECT next_offset, epoch, paused, paused_reason, halted_reason, starts, last_timestamp_ms
    FROM processor_offsets WHERE {_KEY}"""
_CREATE = f"""INSERT INTO processor_offsets
    (processor, stream, partition, next_offset, epoch, paused, paused_reason, starts, updated_at)
    VALUES ($1, $2, $3, $4, 0, {_PAUSE}, 0, {{now}}) ON CONFLICT DO NOTHING"""
_BEGIN = f"UPDATE processor_offsets SET starts = starts + 1 WHERE {_KEY} RETURNING starts"
_BEGUN = f"UPDATE processor_offsets SET starts = $4 WHERE {_KEY}"
_HALT = f"UPDATE processor_offsets SET halted_reason = $4 WHERE {_KEY} AND epoch = $5"
_OBSERVE = f"UPDATE processor_offsets SET end_offset = $4, seen_at = {{now}} WHERE {_KEY}"
