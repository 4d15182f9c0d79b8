"""Who paused, resumed or replayed a processor, in the same table as the changes of rows (those are triggers')."""

from collections.abc import Mapping

import orjson

from streams.log import Partition
from streams.sql import Sql, now

POSITION_TYPE = "processor_offsets"
"""`auditable_type`; the id is the number of the partition, and the new values name processor and stream."""


async def audit_position(
    sql: Sql, event: str, processor: str, partition: Partition, old: Mapping[str, object], new: Mapping[str, object],
    by: str,
) -> None:  # fmt: skip
    """One audit in the caller's transaction."""
    where = {"processor": processor, "stream": partition.stream, "partition": partition.index}
    await sql.fetch(
        f"""INSERT INTO audits
        (event, auditable_type, auditable_id, old_values, new_values, tags, created_at, updated_at)
        VALUES ($1, $2, $3, $4, $5, $6, {now(sql.dialect)}, {now(sql.dialect)})""",  # noqa: S608 - the clock's name
        *(event, POSITION_TYPE, partition.index),
        *(orjson.dumps(dict(old)).decode(), orjson.dumps({**where, **new}).decode(), who(event, by)),
    )


def who(event: str, by: str) -> str:
    """`tags` of an audit: the program, what it did, and for whom."""
    return f"afluente {event} by {by}"[:255]
