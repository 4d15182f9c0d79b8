"""The life of a row as SQL: insert, claim, outcome, reservation; by the rules of docs/life-of-a-row.md.

The row decides; a message is only a hint to look at its row. People own `status`, `attempts` and `next_attempt_at`; the
engine owns `claim_no`, `lease_until`, `queued_until`, `doubts` and `held`. These are the hot statements: text, on
the driver's connection (`sql.py`), one JSON parameter for any number of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from streams import offsets
from streams.database import Dialect
from streams.processor import Limits, NewRow, RowTable
from streams.recovery import ATTEMPTS_USED_UP, OnUnknown
from streams.sql import Row, Sql, among, greatest, item, later, now, numbers, recordset

UNKNOWN = "the process or its connection died after it may have been accepted: outcome unknown"

INSERT_ROWS = 100
"""In one statement. A turn's mails at once are several megabytes, and the driver holds them three times over."""

PENDING = "coalesce(status, '') = 'pending'"
"""For statements that know their ids. Not `status = 'pending'`: before the table was analysed, PostgreSQL took the
index of pending rows for the narrower one and looked through all of them in every commit."""


@dataclass(slots=True)
class Outcome:
    """How one claim ended. `waits` has the back-off for 1, 2, ... attempts used, null where that is the last one."""

    row_id: int
    claim_no: int
    sent: bool = False
    stored: dict[str, object] = field(default_factory=dict)
    error: str | None = None
    reason: str = ATTEMPTS_USED_UP
    waits: tuple[float | None, ...] = ()
    held: bool = False
    in_doubt: bool = False


@dataclass(slots=True)
class Recorded:
    """What a commit of outcomes brought: the rows that are failed now, whether all offsets moved, the new claims."""

    failed: list[Row]
    in_place: bool
    claimed: list[Row]


class Rows:
    """The statements of one table, composed once."""

    confirms = False

    def __init__(self, table: RowTable, limits: Limits, dialect: Dialect) -> None:
        self.table, self.limits, self.dialect = table, limits, dialect
        self.batch = limits.relay_batch
        d = dialect
        self._now = now(d)
        self._key = f'"{table.key}"' if table.key is not None else "CAST(id AS text)"
        self._hold = limits.recovery.on_unknown is OnUnknown.HOLD
        # attempts as a claim or a failure counts them: a try that was in flight at a reset is the first of the new set
        self._used = greatest(d, "attempts", "CASE WHEN lease_until IS NULL THEN 0 ELSE 1 END")
        self._due = f"(next_attempt_at IS NULL OR next_attempt_at <= {self._now})"
        self._free = f"(lease_until IS NULL OR lease_until <= {self._now})"
        self._insert = self._insert_text()
        self._state = self._state_text()
        self._claim = self._claim_text("$1", "$2")
        self._exhaust = self._exhaust_text()
        self._fail = self._fail_text()
        self._defer = self._defer_text()
        self._sent = self._sent_text("$1")
        self._unsent = self._unsent_text()
        self._group = self._group_text() if d == "postgresql" else ""
        self._reserve = self._reserve_text()
        self._expired = self._expired_text()
        self._repeat = self._repeat_text()
        self._release = self._release_text()

    # ---- plan

    async def insert(self, sql: Sql, rows: Sequence[NewRow]) -> list[Row]:
        """Rule 1: insert what is new, as queued, so that the relay leaves it alone. Returns id and key of those."""
        inserted: list[Row] = []
        for start in range(0, len(rows), INSERT_ROWS):
            part = [{**row.values, str(self.table.key): row.key} for row in rows[start : start + INSERT_ROWS]]
            inserted += await sql.fetch(self._insert, *self._columns(part))
        return inserted

    def _columns(self, rows: Sequence[dict[str, Any]]) -> list[object]:
        """The parameters of an insert. On PostgreSQL an array per column: to parse the contents of mails as one JSON
        text would take it as long as all else of the insert."""
        if self.dialect == "sqlite":
            return [_json(rows)]
        kinds = {**self.table.insert, str(self.table.key): "text"}
        return [[_parameter(row.get(name), kind) for row in rows] for name, kind in kinds.items()]

    async def states(self, sql: Sql, keys: Sequence[str], ids: Sequence[int]) -> list[Row]:
        """The rows with these keys or ids: the columns of `known`, and `claimable` (pending, due, no running lease)."""
        named = [{"row_id": None, "row_key": key} for key in keys] + [{"row_id": i, "row_key": None} for i in ids]
        return await sql.fetch(self._state, _json(named)) if named else []

    async def claim(self, sql: Sql, ids: Sequence[int], bare: Sequence[int] = ()) -> list[Row]:
        """Rule 5: claim those that may be claimed; id, claim_no, attempts, key and the columns of `read` of each.

        Of `bare` ones the columns of `read` stay None: a mail's content is most of what a claim would carry.
        """
        parameters = _json([{"row_id": i} for i in ids]), numbers(self.dialect, bare)
        return self._parsed(await sql.fetch(self._claim, *parameters)) if ids else []

    async def exhaust(self, sql: Sql, ids: Sequence[int]) -> list[Row]:
        """Rules 6 and 7: of rows that were not claimed, fail those with no attempt left or an outcome to hold."""
        return await sql.fetch(self._exhaust, _json([{"row_id": i} for i in ids])) if ids else []

    async def defer(self, sql: Sql, waits: Sequence[tuple[int, float]]) -> None:
        """Not before so many seconds, for rows whose provider is away: without a claim, so that no try is counted."""
        await sql.fetch(self._defer, _json([{"row_id": row_id, "wait": wait} for row_id, wait in waits]))

    # ---- record

    async def record(
        self,
        sql: Sql,
        outcomes: Sequence[Outcome],
        advances: Sequence[offsets.Advance],
        claims: Sequence[int],
        bare: Sequence[int] = (),
    ) -> Recorded:
        """Rules 10 to 14 and 5 in one transaction, the caller's or (only sent outcomes on PostgreSQL) one statement.

        When an offset does not move, outcomes stay recorded (they are facts) and nothing is claimed.
        """
        failures = [o for o in outcomes if not o.sent]
        failed = await sql.fetch(self._fail, _json([_failure(o) for o in failures])) if failures else []
        sent = [{"row_id": o.row_id, **o.stored} for o in outcomes if o.sent]
        if self.dialect == "postgresql":
            return await self._record_at_once(sql, failed, sent, advances, (claims, bare))
        if sent:
            await sql.fetch(self._sent, _json(sent))
        in_place = await offsets.advance(sql, advances)
        return Recorded(failed, in_place, await self.claim(sql, claims, bare) if in_place else [])

    async def lock_unsent(self, sql: Sql, ids: Sequence[int]) -> set[int]:
        """Lock these until the transaction ends; those that are there and not sent."""
        return {row["id"] for row in await sql.fetch(self._unsent, _json([{"row_id": i} for i in ids]))}

    async def record_sent(self, sql: Sql, outcome: Outcome) -> None:
        """Rule 10 for one row alone, for when a person's lock on another row holds the group up."""
        await sql.fetch(self._sent, _json([{"row_id": outcome.row_id, **outcome.stored}]))

    async def _record_at_once(
        self,
        sql: Sql,
        failed: list[Row],
        sent: list[dict[str, Any]],
        advances: Sequence[offsets.Advance],
        claims: tuple[Sequence[int], Sequence[int]],
    ) -> Recorded:
        moves = [advance._asdict() for advance in advances]
        ids, bare = [{"row_id": i} for i in claims[0]], list(claims[1])
        [row] = await sql.fetch(self._group, _json(sent), _json(moves), _json(ids), len(moves), bare)
        claimed = orjson.loads(row["claimed"]) if row["claimed"] else []
        return Recorded(failed, row["moved"] == len(moves), self._parsed(claimed))

    # ---- relay

    async def reserve(self, sql: Sql, limit: int) -> list[Row]:
        """Rule 3, first publication of a try: due rows with no message under way, reserved for `visibility` seconds."""
        return await sql.fetch(self._reserve, limit)

    async def expired(self, sql: Sql, limit: int) -> list[Row]:
        """Rule 3, repeats: id and key of rows whose message should have arrived long ago, in no order."""
        return await sql.fetch(self._expired, limit)

    async def repeat(self, sql: Sql, ids: Sequence[int]) -> list[Row]:
        """Reserve these again, if their reservation is over still."""
        return await sql.fetch(self._repeat, _json([{"row_id": i} for i in ids])) if ids else []

    async def release(self, sql: Sql, rows: Sequence[Row]) -> None:
        """Rule 4: what was not confirmed is free again, if claim_no and queued_until are still those we wrote."""
        marks = [{"row_id": r["id"], "fence": r["claim_no"], "queued": str(r["queued_until"])} for r in rows]
        await sql.fetch(self._release, _json(marks))

    async def confirm(self, sql: Sql, rows: Sequence[Row]) -> None:
        """Nothing: the claim takes the mark away."""

    # ---- the texts

    def _insert_text(self) -> str:
        t = self.table
        columns = {**t.insert, str(t.key): "text"}
        names = ", ".join(f'"{name}"' for name in columns)
        source = recordset(self.dialect, "$1", "x", columns)
        if self.dialect == "postgresql":
            arrays = ", ".join(f"${number}::{kind}[]" for number, kind in enumerate(columns.values(), 1))
            source = f"unnest({arrays}) AS x({names})"
        return f"""
            INSERT INTO {t.name} ({names}, status, attempts, queued_until, created_at, updated_at)
            SELECT {names}, 'pending', 0, {later(self.dialect, str(self.limits.visibility))}, {self._now}, {self._now}
            FROM {source} WHERE true ON CONFLICT ("{t.key}") DO NOTHING RETURNING id, "{t.key}" AS row_key"""

    def _state_text(self) -> str:
        t = self.table
        known = "".join(f't."{name}", ' for name in t.known)
        source = recordset(self.dialect, "$1", "x", {"row_id": "bigint", "row_key": "text"})
        columns = f"""t.id, {self._key} AS row_key, t.attempts, {known}
            (t.status = 'pending' AND {self._due} AND {self._free}) AS claimable"""
        by_id = f"SELECT {columns} FROM {source} JOIN {t.name} AS t ON t.id = x.row_id WHERE x.row_id IS NOT NULL"
        if t.key is None:
            return by_id
        # two index look-ups instead of one OR, which would scan the table
        by_key = f'SELECT {columns} FROM {source} JOIN {t.name} AS t ON t."{t.key}" = x.row_key'
        return f"{by_key} WHERE x.row_key IS NOT NULL UNION ALL {by_id}"

    def _claim_text(self, parameter: str, bare: str, condition: str = "") -> str:
        t, limits = self.table, self.limits
        unheld = "AND lease_until IS NULL" if self._hold else ""
        wanted = f"CASE WHEN NOT {among(self.dialect, 'id', bare)} THEN"
        read = "".join(
            f', {wanted} {_as_text(name) if name in t.as_text else _quoted(name)} END AS "{name}"' for name in t.read
        )
        return f"""
            UPDATE {t.name} AS t SET attempts = {self._used} + 1, claim_no = claim_no + 1,
                lease_until = {later(self.dialect, str(limits.lease))}, queued_until = NULL,
                doubts = doubts + CASE WHEN lease_until IS NULL THEN 0 ELSE 1 END, updated_at = {self._now}
            WHERE {self._unlocked(parameter)} AND {PENDING} AND {self._due} AND {self._free} {unheld}
                AND {self._used} < {limits.recovery.max_attempts} {condition}
            RETURNING id, claim_no, attempts, {self._key} AS row_key{read}"""

    def _unlocked(self, parameter: str) -> str:
        """The rows of the parameter, less those that somebody has locked: whose transaction holds up its row alone.
        What was passed over is still pending, and the relay brings it back. An array, so that the ids always lead the
        plan."""
        ids = recordset(self.dialect, parameter, "x", {"row_id": "bigint"})
        if self.dialect == "sqlite":
            return f"id IN (SELECT x.row_id FROM {ids})"
        locked = f"""SELECT l.id FROM {self.table.name} AS l WHERE l.id = ANY(ARRAY(SELECT x.row_id FROM {ids}))
            FOR UPDATE OF l SKIP LOCKED"""
        return f"id = ANY(ARRAY({locked}))"

    def _among(self, parameter: str) -> str:
        """Said besides the join, so that the ids lead the plan: PostgreSQL takes any recordset for 100 rows, and would
        rather read the whole of a table with some thousands, in every commit."""
        if self.dialect == "sqlite":
            return "true"
        return (
            f"t.id = ANY(ARRAY(SELECT a.row_id FROM {recordset(self.dialect, parameter, 'a', {'row_id': 'bigint'})}))"
        )

    def _exhaust_text(self) -> str:
        t = self.table
        held = "lease_until IS NOT NULL" if self._hold else "false"
        return f"""
            UPDATE {t.name} AS t SET status = 'failed', held = ({held}),
                "{t.error}" = CASE WHEN ({held}) THEN '{UNKNOWN}'
                    WHEN lease_until IS NOT NULL THEN 'attempts used up; {UNKNOWN}'
                    ELSE 'attempts used up; last error: ' || coalesce("{t.error}", 'none') END,
                doubts = doubts + CASE WHEN lease_until IS NULL THEN 0 ELSE 1 END,
                lease_until = NULL, queued_until = NULL, next_attempt_at = NULL, updated_at = {self._now}
            WHERE {self._unlocked("$1")} AND {PENDING} AND {self._due} AND {self._free}
                AND ({self._used} >= {self.limits.recovery.max_attempts} OR ({held}))
            RETURNING id, claim_no, attempts, held, status, created_at, {self._key} AS row_key, "{t.error}" AS error"""

    def _defer_text(self) -> str:
        return f"""
            UPDATE {self.table.name} AS t SET next_attempt_at = {later(self.dialect, "x.wait")}, queued_until = NULL,
                updated_at = {self._now}
            FROM {recordset(self.dialect, "$1", "x", {"row_id": "bigint", "wait": "float8"})}
            WHERE t.id = x.row_id AND {self._unlocked("$1")} AND {PENDING} AND {self._due} AND {self._free}"""

    def _fail_text(self) -> str:
        t, d = self.table, self.dialect
        columns = {
            "row_id": "bigint",
            "fence": "bigint",
            "failure": "text",
            "waits": "json",
            "hold": "boolean",
            "doubt": "int",
        }
        wait = item(d, "waits", f"{self._used} - 1")
        final = f"(hold OR {wait} IS NULL)"
        return f"""
            UPDATE {t.name} AS t SET attempts = {self._used}, "{t.error}" = failure, held = hold,
                status = CASE WHEN {final} THEN 'failed' ELSE 'pending' END,
                next_attempt_at = CASE WHEN {final} THEN NULL ELSE {later(d, f"coalesce({wait}, 0)")} END,
                doubts = doubts + doubt, lease_until = NULL, queued_until = NULL, updated_at = {self._now}
            FROM {recordset(d, "$1", "x", columns)}
            WHERE t.id = x.row_id AND {self._among("$1")} AND claim_no = x.fence AND {PENDING}
                AND lease_until IS NOT NULL
            RETURNING id, claim_no, attempts, held, status, created_at, {self._key} AS row_key, "{t.error}" AS error"""

    def _sent_text(self, parameter: str) -> str:
        t = self.table
        columns = {"row_id": "bigint"} | {f"new_{name}": kind for name, kind in t.stored.items()}
        stored = "".join(f', "{name}" = coalesce(new_{name}, "{name}")' for name in t.stored)
        times = "".join(f", {name} = {self._now}" for name in t.sent_times)
        return f"""
            UPDATE {t.name} AS t SET status = 'sent'{times}{stored}, "{t.error}" = NULL, held = false,
                next_attempt_at = NULL, lease_until = NULL, queued_until = NULL, updated_at = {self._now}
            FROM {recordset(self.dialect, parameter, "x", columns)}
            WHERE t.id = x.row_id AND {self._among(parameter)} AND status IS DISTINCT FROM 'sent'"""

    def _unsent_text(self) -> str:
        """In the order of ids, so that two who lock the same rows do not wait for each other."""
        ids = recordset(self.dialect, "$1", "x", {"row_id": "bigint"})
        lock = "FOR UPDATE" if self.dialect == "postgresql" else ""
        return f"""SELECT id FROM {self.table.name} WHERE id IN (SELECT x.row_id FROM {ids})
            AND status IS DISTINCT FROM 'sent' ORDER BY id {lock}"""

    def _group_text(self) -> str:
        """Outcomes, offsets and claims in one statement: one round trip, and a commit of its own."""
        moved = "AND (SELECT count(*) FROM moved) = $4::bigint"
        return f"""
            WITH sent AS ({self._sent_text("$1")} RETURNING id),
                moved AS ({offsets.advance_text(self.dialect, "$2")}),
                claimed AS ({self._claim_text("$3", "$5", moved)})
            SELECT (SELECT count(*) FROM sent) AS sent, (SELECT count(*) FROM moved) AS moved,
                (SELECT json_agg(claimed)::text FROM claimed) AS claimed"""

    def _reserve_text(self) -> str:
        """On PostgreSQL as an array: it takes `IN (... LIMIT $1)` for so many rows that it would rather read the whole
        of a table with some thousands, for every event."""
        t, d = self.table, self.dialect
        due = f"""SELECT id FROM {t.name}
                WHERE status = 'pending' AND queued_until IS NULL AND {self._due} AND {self._free}
                ORDER BY {t.due[d]} LIMIT $1"""
        among = f"= ANY(ARRAY({due} FOR UPDATE SKIP LOCKED))" if d == "postgresql" else f"IN ({due})"
        return f"""
            UPDATE {t.name} SET queued_until = {later(d, str(self.limits.visibility))}, updated_at = {self._now}
            WHERE id {among}
            RETURNING {self._reserved()}"""

    def _expired_text(self) -> str:
        t, order = self.table, self.table.due[self.dialect]
        lead = f"AND {order} <= {self._now}" if "queued_until" in order else ""
        return f"""
            SELECT id, {self._key} AS row_key FROM {t.name}
            WHERE status = 'pending' AND queued_until <= {self._now} {lead} AND {self._due} AND {self._free}
            ORDER BY random() LIMIT $1"""

    def _repeat_text(self) -> str:
        t, d = self.table, self.dialect
        return f"""
            UPDATE {t.name} AS t SET queued_until = {later(d, str(self.limits.visibility))}, updated_at = {self._now}
            FROM {recordset(d, "$1", "x", {"row_id": "bigint"})}
            WHERE t.id = x.row_id AND {PENDING} AND queued_until <= {self._now} AND {self._due} AND {self._free}
            RETURNING {self._reserved()}"""

    def _reserved(self) -> str:
        text = "queued_until::text" if self.dialect == "postgresql" else "queued_until"
        return f"id, {self._key} AS row_key, attempts, claim_no, {text} AS queued_until"

    def _release_text(self) -> str:
        t, d = self.table, self.dialect
        queued = "x.queued::timestamptz" if d == "postgresql" else "x.queued"
        return f"""
            UPDATE {t.name} AS t SET queued_until = NULL
            FROM {recordset(d, "$1", "x", {"row_id": "bigint", "fence": "bigint", "queued": "text"})}
            WHERE t.id = x.row_id AND claim_no = x.fence AND queued_until = {queued}"""

    def _parsed(self, rows: Sequence[Row]) -> list[Row]:
        """JSON columns come as text from SQLite and as objects from PostgreSQL, where a text is a JSON text."""
        kinds = self.table.insert
        names = [name for name in self.table.read if kinds.get(name) == "json"] if self.dialect == "sqlite" else []
        return [{**row, **{name: _object(row[name]) for name in names}} for row in rows]


def _object(text: str | None) -> object:
    """What people have broken by hand stays text; the act says what it thinks of it."""
    try:
        return orjson.loads(text) if text is not None else None
    except orjson.JSONDecodeError:
        return text


def _failure(outcome: Outcome) -> dict[str, object]:
    return {
        "row_id": outcome.row_id,
        "fence": outcome.claim_no,
        "failure": outcome.error,
        "waits": list(outcome.waits),
        "hold": outcome.held,
        "doubt": int(outcome.in_doubt),
    }


def _parameter(value: object, kind: str) -> object:
    return _json(value) if kind == "json" and value is not None else value


def _json(value: object) -> str:
    return orjson.dumps(value).decode()


def _quoted(name: str) -> str:
    return f'"{name}"'


def _as_text(name: str) -> str:
    return f'CAST("{name}" AS text)'
