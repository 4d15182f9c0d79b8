"""Dead letters as people look at them, and one of them tried again; how many and how fast is the caller's.

A letter is open while it still needs somebody: its row is failed since the very claim that wrote it, or, for a record
that never became a row, nobody has redriven it. A retry by plain SQL closes it as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from streams.sql import Row, Sql, later, now

State = Literal["open", "held", "sent", "in flight", "waiting", "failed again", "gone", "redriven"]
"""open and held still need somebody; the others say what became of it."""

SENTENCES: Mapping[State, str] = {
    "held": "held, for its mail may have arrived: --include-unknown releases it",
    "sent": "its row is sent",
    "in flight": "its row is being tried right now",
    "waiting": "its row waits for its turn already",
    "failed again": "its row has failed again since: that has a dead letter of its own",
    "gone": "its row does not exist any more",
    "redriven": "it was redriven before",
}
"""Why a letter in this state is not redriven."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which letters are meant; None and empty mean any. Ages in seconds."""

    reason: str | None = None
    processor: str | None = None
    batch: str | None = None
    """The beginning of a batch id."""
    ids: Sequence[int] = ()
    older: float | None = None
    newer: float | None = None
    open_only: bool = True
    before: int | None = None
    """Letters with a smaller id."""


class Letters:
    """The statements on one connection. `tables` are those whose rows dead letters name, with the column of the batch
    that a row came with, if it has one."""

    def __init__(self, sql: Sql, tables: Mapping[str, str | None]) -> None:
        self._sql, self._tables = sql, tables
        self._now = now(sql.dialect)

    # ---- looking

    async def states(self, wanted: Filter) -> list[Row]:
        """Id and state of those that are meant, the oldest first."""
        condition, values = self._where(wanted)
        return await self._sql.fetch(
            f"SELECT l.id, l.state FROM ({self._with_state()}) AS l WHERE {condition} ORDER BY l.id", *values
        )

    async def count(self, wanted: Filter) -> list[Row]:
        """How many there are, by processor, reason and state."""
        condition, values = self._where(wanted)
        return await self._sql.fetch(
            f"""SELECT l.processor, l.reason, l.state, count(*) AS letters FROM ({self._with_state()}) AS l
            WHERE {condition} GROUP BY l.processor, l.reason, l.state ORDER BY count(*) DESC, 1, 2, 3""",
            *values,
        )

    async def newest(self, wanted: Filter, limit: int) -> list[Row]:
        """Columns of the table but the body, and `state`."""
        condition, values = self._where(wanted)
        return await self._sql.fetch(
            f"SELECT * FROM ({self._with_state()}) AS l WHERE {condition} ORDER BY l.id DESC LIMIT ${len(values) + 1}",
            *values,
            limit,
        )

    async def one(self, letter_id: int) -> Row | None:
        """The same of one letter, None if there is none."""
        rows = await self.newest(Filter(ids=[letter_id], open_only=False), 1)
        return rows[0] if rows else None

    async def body(self, letter_id: int) -> bytes | None:
        """The original bytes."""
        rows = await self._sql.fetch("SELECT body FROM dead_letters WHERE id = $1", letter_id)
        return rows[0]["body"] if rows else None

    # ---- trying again

    async def retry_row(self, letter: Row, by: str, include_unknown: bool) -> State | None:
        """Rule 19: make the letter's row due, in the caller's transaction; None when that was done, else why not.

        Guarded by the row itself: what was seen of it before may be over by now.
        """
        done = await self._sql.fetch(
            f"""UPDATE {self._table(letter)}
            SET status = 'pending', attempts = 0, held = false, updated_at = {self._now}
            WHERE id = $1 AND claim_no = $2 AND status = 'failed' AND (NOT held OR $3) RETURNING id""",
            *(letter["row_id"], letter["claim_no"], include_unknown),
        )
        if not done:
            seen = await self.one(letter["id"])
            state: State = seen["state"] if seen is not None else "gone"
            return "waiting" if state == "open" else state  # it was something else a moment ago
        await self.done(letter["id"], by)
        return None

    async def begin(self, letter_id: int, by: str) -> bool:
        """Note who is about to publish a letter's bytes again; False when that was done before."""
        rows = await self._sql.fetch(
            "UPDATE dead_letters SET redriven_by = $2 WHERE id = $1 AND redriven_at IS NULL RETURNING id", letter_id, by
        )
        return bool(rows)

    async def done(self, letter_id: int, by: str) -> None:
        """It was redriven."""
        await self._sql.fetch(
            f"UPDATE dead_letters SET redriven_at = {self._now}, redriven_by = $2 WHERE id = $1", letter_id, by
        )

    # ---- the texts

    def _table(self, letter: Row) -> str:
        name: str = letter["table_name"]
        if name not in self._tables:
            raise LookupError(f"dead letter {letter['id']} names a table that this release does not know")
        return name

    def _with_state(self) -> str:
        names = {table: f"r{n}" for n, table in enumerate(self._tables)}
        joins = " ".join(
            f"LEFT JOIN {table} AS {name} ON d.table_name = '{table}' AND {name}.id = d.row_id"
            for table, name in names.items()
        )
        row = {column: _first([f"{name}.{column}" for name in names.values()]) for column in _OF_ROW}
        batch = _first(["d.batch_id", *(f"{names[t]}.{column}" for t, column in self._tables.items() if column)])
        return f"""
            SELECT {", ".join(f"d.{column}" for column in _SHOWN)}, {batch} AS batch_id, CASE
                WHEN d.row_id IS NULL THEN CASE WHEN d.redriven_at IS NULL THEN 'open' ELSE 'redriven' END
                WHEN {row["id"]} IS NULL THEN 'gone'
                WHEN {row["status"]} = 'pending' AND {row["lease_until"]} > {self._now} THEN 'in flight'
                WHEN {row["status"]} = 'pending' THEN 'waiting'
                WHEN {row["status"]} = 'sent' THEN 'sent'
                WHEN {row["claim_no"]} <> d.claim_no THEN 'failed again'
                WHEN {row["held"]} THEN 'held'
                ELSE 'open' END AS state
            FROM dead_letters AS d {joins}"""

    def _where(self, wanted: Filter) -> tuple[str, list[object]]:
        """A condition on `l`, and its parameters from $1 on."""
        conditions: list[str] = ["true"]
        values: list[object] = []

        def add(condition: str, value: object) -> None:
            values.append(value)
            conditions.append(condition.format(f"${len(values)}"))

        for column, value in (("reason", wanted.reason), ("processor", wanted.processor)):
            if value is not None:
                add(f"l.{column} = {{}}", value)
        if wanted.batch is not None:
            add("l.batch_id LIKE {}", f"{wanted.batch}%")
        for sign, age in (("<=", wanted.older), (">=", wanted.newer)):
            if age is not None:
                conditions.append(f"l.created_at {sign} {later(self._sql.dialect, str(-age))}")
        if wanted.before is not None:
            add("l.id < {}", wanted.before)
        if wanted.ids:
            conditions.append(f"l.id IN ({', '.join(str(int(n)) for n in wanted.ids)})")
        if wanted.open_only:
            conditions.append("l.state IN ('open', 'held')")
        return " AND ".join(conditions), values


_OF_ROW = ("id", "status", "held", "claim_no", "lease_until")
_SHOWN = (
    *("id", "processor", "source_stream", "source_partition", "source_offset", "item_index", "message_key"),
    *("table_name", "row_id", "claim_no", "reason", "error", "attempts", "created_at", "redriven_at", "redriven_by"),
    *("redriven_from", "published_at", "first_at"),
)


def _first(values: Sequence[str]) -> str:
    """The first that is not null; SQLite's coalesce wants at least two."""
    return values[0] if len(values) == 1 else f"coalesce({', '.join(values)})"
