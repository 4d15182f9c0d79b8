"""The splitter as the engine runs it: what a split publishes, whom it lays to rest, and how it is counted.

Counts are kept by source offset, so that a turn that is repeated after a crash counts nothing twice.
"""

from collections.abc import Iterator, Sequence

import orjson

from processors.splitter.split import Split, publisher_name, split, split_steps
from streams.dead_letters import DeadLetter
from streams.log import Partition, Record
from streams.message import Message, decode
from streams.processor import Transformed
from streams.sql import Sql, now, recordset

NAME = "splitter"


def new_keys(message: Message) -> list[str]:
    """The keys of those who would be mailed, unless they have a row. Raises Reject for the whole record."""
    [outgoing] = split(message, 0, 1).outgoing
    return [decode(data).id for _, data in outgoing]


class Splitter:
    """See `streams.processor.Transform`."""

    name = NAME

    def __init__(self, stream: str, target: str) -> None:
        """`stream` holds the imports, `target` gets a message for each recipient."""
        self.stream, self.target = stream, target

    def publisher_name(self, partition: int, epoch: int) -> str:
        return publisher_name(self.stream, partition, epoch)

    def transform(self, message: Message, offset: int, partitions: int) -> Iterator[Transformed | None]:
        steps = split_steps(message, offset, partitions)
        whole = next(steps)
        for _ in steps:  # the same split, growing
            yield None
        yield Transformed(whole.outgoing, facts=whole)

    async def record(
        self, sql: Sql, records: Sequence[Record], partition: Partition, results: Sequence[Transformed]
    ) -> Sequence[DeadLetter]:
        """Slices, batches and duplicates. The dead letters of rejected registrations are the engine's to lay."""
        found: list[tuple[Record, Split]] = [(r, result.facts) for r, result in zip(records, results, strict=True)]
        if new := [(record, split) for record, split in found if split.redriven_from is None]:
            splits = [split for _, split in new]
            await _count_slices(sql, [record for record, _ in new], partition, splits)
            await _count_duplicates(sql, splits)
            await _count_batches(sql, splits)
        return [letter for record, split in found for letter in _dead(record, partition, split)]


def _dead(record: Record, partition: Partition, split: Split) -> list[DeadLetter]:
    return [
        DeadLetter(
            NAME,
            partition.stream,
            partition.index,
            rejected.reason,
            rejected.error,
            offset=record.offset,
            item_index=rejected.item_index,
            batch_id=split.batch_id,
            body=rejected.item,
            redriven_from=split.redriven_from,
        )
        for rejected in split.rejected
    ]


async def _count_slices(sql: Sql, records: Sequence[Record], partition: Partition, splits: Sequence[Split]) -> None:
    rows = [
        {
            "stream": partition.stream,
            "partition": partition.index,
            "source_offset": record.offset,
            "batch_id": split.batch_id,
            "first_index": split.first_index,
            "items": split.items,
            "valid": split.valid,
            "rejected": len(split.rejected),
            "duplicates": len(split.duplicates),
        }
        for record, split in zip(records, splits, strict=True)
    ]
    await _insert(sql, "import_slices", _SLICE, rows, created_at=True)


async def _count_duplicates(sql: Sql, splits: Sequence[Split]) -> None:
    """Keys that a slice repeats; the mailer adds those that it finds to belong to another slice or batch."""
    rows = [
        {"batch_id": split.batch_id, "item_index": duplicate.item_index, "idempotency_key": duplicate.key}
        for split in splits
        for duplicate in split.duplicates
    ]
    if rows:
        await _insert(
            sql, "batch_duplicates", {"batch_id": "text", "item_index": "int", "idempotency_key": "text"}, rows
        )


async def _count_batches(sql: Sql, splits: Sequence[Split]) -> None:
    """Compute the numbers anew from the slices: each part of a batch once, however often it came."""
    rows = [{"batch_id": split.batch_id, "total": split.total} for split in splits]
    await _insert(sql, "import_batches", {"batch_id": "text", "total": "int"}, rows, created_at=True)
    ids = recordset(sql.dialect, "$1", "x", {"batch_id": "text"})
    await sql.fetch(
        f"""
        UPDATE import_batches AS b SET received = s.items, valid = s.valid, rejected = s.rejected,
            duplicates = s.duplicates, times_received = s.times, updated_at = {now(sql.dialect)}
        FROM (SELECT batch_id, sum(items) AS items, sum(valid) AS valid, sum(rejected) AS rejected,
                  sum(duplicates) AS duplicates, max(times) AS times
              FROM (SELECT batch_id, first_index, max(items) AS items, max(valid) AS valid, max(rejected) AS rejected,
                        max(duplicates) AS duplicates, count(*) AS times
                    FROM import_slices WHERE batch_id IN (SELECT x.batch_id FROM {ids})
                    GROUP BY batch_id, first_index) AS parts
              GROUP BY batch_id) AS s
        WHERE b.batch_id = s.batch_id""",
        orjson.dumps(rows).decode(),
    )


_DUPLICATE = {"batch_id": "text", "item_index": "int", "idempotency_key": "text"}
_SLICE = {
    "stream": "text",
    "partition": "int",
    "source_offset": "bigint",
    "batch_id": "text",
    "first_index": "int",
    "items": "int",
    "valid": "int",
    "rejected": "int",
    "duplicates": "int",
}


async def _insert(
    sql: Sql, table: str, columns: dict[str, str], rows: Sequence[dict[str, object]], *, created_at: bool = False
) -> None:
    names = ", ".join(f'"{name}"' for name in columns)
    stamp, value = (", created_at", f", {now(sql.dialect)}") if created_at else ("", "")
    await sql.fetch(
        f"""INSERT INTO {table} ({names}{stamp}) SELECT {names}{value}
        FROM {recordset(sql.dialect, "$1", "x", columns)} WHERE true ON CONFLICT DO NOTHING""",
        orjson.dumps(list(rows)).decode(),
    )
