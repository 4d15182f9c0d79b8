"""The rules of a row, one by one, as the database keeps them: who may claim, what is written, what is refused."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from processors.mailer.processor import TABLE
from streams import offsets
from streams.database import connect, dialect
from streams.log import Partition
from streams.offsets import Advance
from streams.processor import Limits
from streams.recovery import OUTCOME_UNKNOWN, OnUnknown, RecoveryPolicy
from streams.rows import UNKNOWN, Outcome, Recorded, Rows
from streams.sql import Database, Row, Sql
from tests.support.databases import from_now, query
from tests.support.engine import new_row

LIMITS = Limits(recovery=RecoveryPolicy(max_attempts=3, backoff=(60.0,)), lease=120.0, visibility=60.0)
HOLD = replace(LIMITS, recovery=replace(LIMITS.recovery, on_unknown=OnUnknown.HOLD))
PARTITION = Partition("recipients", 0, "recipients-0")


class Table:
    """The table under test, and the statements on it as two processes would use them."""

    def __init__(self, engine: AsyncEngine, limits: Limits = LIMITS) -> None:
        self.engine = engine
        self.rows = Rows(TABLE, limits, dialect(engine))
        self._database = Database(engine, 5.0)

    @asynccontextmanager
    async def sql(self) -> AsyncIterator[Sql]:
        """A transaction on a connection of its own."""
        async with self._database.open() as sql, sql.transaction():
            yield sql

    async def a_row(self, key: str = "k", **columns: str) -> int:
        """A pending row that is due; `columns` are SQL expressions."""
        columns = {"status": "'pending'", "idempotency_key": f"'{key}'", **columns}
        names, values = ", ".join(columns), ", ".join(columns.values())
        found = await query(
            self.engine,
            f"""INSERT INTO email_dispatches ("to", subject, content, mailable_type, {names})
                VALUES ('a@example.com', 's', 'c', 'm', {values}) RETURNING id""",
        )
        return int(found[0]["id"])

    async def get(self, row_id: int) -> dict[str, Any]:
        """A row, and what its times say: whether they lie ahead."""
        times = ("next_attempt_at", "lease_until", "queued_until")
        ahead = ", ".join(f"{name} > {from_now(self.engine, 0)} AS {name}_ahead" for name in times)
        [row] = await query(self.engine, f"SELECT *, {ahead} FROM email_dispatches WHERE id = :id", id=row_id)
        return row

    def ago(self, seconds: float = 5) -> str:
        """SQL: a time that is over."""
        return from_now(self.engine, -seconds)

    def ahead(self, seconds: float = 50) -> str:
        """SQL: a time that is to come."""
        return from_now(self.engine, seconds)

    async def set(self, row_id: int, **columns: str) -> None:
        """What a person does by hand."""
        changes = ", ".join(f"{name} = {value}" for name, value in columns.items())
        await query(self.engine, f"UPDATE email_dispatches SET {changes} WHERE id = :id", id=row_id)

    async def claim(self, *ids: int) -> list[Row]:
        """Rule 5."""
        async with self.sql() as sql:
            return await self.rows.claim(sql, ids)

    async def claimed(self, row_id: int) -> int:
        """Claim a row; its claim_no."""
        [row] = await self.claim(row_id)
        return int(row["claim_no"])

    async def exhaust(self, *ids: int) -> list[Row]:
        """Rules 6 and 7."""
        async with self.sql() as sql:
            return await self.rows.exhaust(sql, ids)

    async def record(
        self, *outcomes: Outcome, advances: Sequence[Advance] = (), claims: Sequence[int] = ()
    ) -> Recorded:
        """Rules 10 to 14."""
        async with self.sql() as sql:
            return await self.rows.record(sql, outcomes, advances, claims)

    async def reserve(self, limit: int = 10) -> list[Row]:
        """Rule 3, first publication."""
        async with self.sql() as sql:
            return await self.rows.reserve(sql, limit)

    async def audits(self) -> list[dict[str, Any]]:
        """All, with their values as objects."""
        found = await query(self.engine, "SELECT * FROM audits ORDER BY id")
        return [{**a, "old": json.loads(a["old_values"]), "new": json.loads(a["new_values"])} for a in found]


@pytest.fixture
def table(engine: AsyncEngine) -> Table:
    """The table in mode resend."""
    return Table(engine)


@pytest.fixture
def held_table(engine: AsyncEngine) -> Table:
    """The table in mode hold."""
    return Table(engine, HOLD)


def failure(row_id: int, claim_no: int, *, waits: Sequence[float | None] = (60.0, 60.0, None), **more: Any) -> Outcome:
    """An act that failed."""
    return Outcome(row_id, claim_no, error="refused", waits=tuple(waits), **more)


def sent(row_id: int, claim_no: int, **stored: object) -> Outcome:
    """An act that was done."""
    return Outcome(row_id, claim_no, sent=True, stored={f"new_{name}": value for name, value in stored.items()})


# ---- rule 1: insert


async def test_a_new_row_is_pending_queued_and_never_tried_when_inserted(table: Table) -> None:
    """Inserted as queued: the relay would else publish it again before it is claimed."""
    async with table.sql() as sql:
        [found] = await table.rows.insert(sql, [new_row("k")])
    row = await table.get(found["id"])
    assert (row["status"], row["attempts"], row["claim_no"]) == ("pending", 0, 0)
    assert row["queued_until_ahead"]
    assert row["created_at"] is not None
    assert await table.reserve() == []


async def test_a_row_stays_as_it_is_when_its_key_comes_again(table: Table) -> None:
    """ON CONFLICT DO NOTHING: only what is new is answered, nothing is overwritten."""
    old = await table.a_row("old", status="'failed'", error_message="'why'")
    async with table.sql() as sql:
        found = await table.rows.insert(sql, [new_row("old"), new_row("new")])
    assert [row["row_key"] for row in found] == ["new"]
    row = await table.get(old)
    assert (row["status"], row["error_message"]) == ("failed", "why")


async def test_states_say_which_rows_may_be_claimed(table: Table) -> None:
    """By key and by id: due and free, also when a message is under way; a row that waits, runs or is over is not."""
    expected = {
        await table.a_row("due"): True,
        await table.a_row("queued", queued_until=table.ahead()): True,
        await table.a_row("was to wait", next_attempt_at=table.ago()): True,
        await table.a_row("lapsed", lease_until=table.ago()): True,
        await table.a_row("waits", next_attempt_at=table.ahead()): False,
        await table.a_row("runs", lease_until=table.ahead()): False,
        await table.a_row("sent", status="'sent'"): False,
        await table.a_row("failed", status="'failed'"): False,
        await table.a_row("legacy", status="NULL"): False,
    }
    async with table.sql() as sql:
        by_id = await table.rows.states(sql, [], list(expected))
        by_key = await table.rows.states(sql, [row["row_key"] for row in by_id], [])
        assert await table.rows.states(sql, ["no such key"], [999_999]) == []
    assert {row["id"]: bool(row["claimable"]) for row in by_id} == expected
    assert {row["id"]: bool(row["claimable"]) for row in by_key} == expected


# ---- rule 5: claim


async def test_a_claim_counts_the_try_and_sets_the_lease(table: Table) -> None:
    """attempts and claim_no rise, the lease runs, no message is awaited any more, nobody is in doubt."""
    row_id = await table.a_row(queued_until=table.ahead(), meta="'{\"a\": 1}'")
    [claimed] = await table.claim(row_id)
    assert (claimed["id"], claimed["claim_no"], claimed["attempts"], claimed["row_key"]) == (row_id, 1, 1, "k")
    assert (claimed["subject"], claimed["meta"]) == ("s", {"a": 1})
    row = await table.get(row_id)
    assert row["lease_until_ahead"]
    assert (row["queued_until"], row["doubts"], row["status"]) == (None, 0, "pending")


async def test_a_claim_leaves_out_what_is_known_already(table: Table) -> None:
    """The content of a mail that was just rendered is not fetched again; that of its neighbour is."""
    here, there = await table.a_row("here"), await table.a_row("there")
    async with table.sql() as sql:
        claimed = {row["id"]: row for row in await table.rows.claim(sql, [here, there], bare=[here])}
    assert [claimed[here][name] for name in ("subject", "content", "meta", "message_id")] == [None] * 4
    assert claimed[there]["subject"] == "s"
    assert claimed[here]["claim_no"] == claimed[there]["claim_no"] == 1


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("next_attempt_at", "ahead"),
        ("lease_until", "ahead"),
        ("attempts", "3"),
        ("status", "'sent'"),
        ("status", "'failed'"),
        ("status", "NULL"),
    ],
)
async def test_a_row_is_not_claimed_when_it_says_no(table: Table, column: str, value: str) -> None:
    """Not due, in flight, no attempt left, over, or legacy: nothing of it changes."""
    row_id = await table.a_row(**{column: table.ahead() if value == "ahead" else value})
    before = await table.get(row_id)
    assert await table.claim(row_id) == []
    assert await table.get(row_id) == before


async def test_a_lapsed_lease_is_a_doubt_when_the_row_is_claimed_again(table: Table) -> None:
    """Its outcome was never learnt: doubts rises, and the audit has a line with who."""
    row_id = await table.a_row(lease_until=table.ago(), attempts="1", claim_no="1")
    [claimed] = await table.claim(row_id)
    assert (claimed["claim_no"], claimed["attempts"]) == (2, 2)
    assert (await table.get(row_id))["doubts"] == 1
    line = (await table.audits())[-1]
    assert (line["old"]["doubts"], line["new"]["doubts"]) == (0, 1)
    assert line["tags"] == ("engine" if dialect(table.engine) == "sqlite" else "afluente-test postgres")


async def test_a_try_in_flight_at_a_reset_is_the_first_of_the_new_set(table: Table) -> None:
    """A person set attempts to 0 while the lease ran, and the holder died: the next claim is the second try."""
    row_id = await table.a_row(lease_until=table.ago(), attempts="0", claim_no="3")
    [claimed] = await table.claim(row_id)
    assert (claimed["claim_no"], claimed["attempts"]) == (4, 2)


async def test_one_of_many_claims_gets_each_row_when_they_come_at_once(table: Table) -> None:
    """Ten claims of the same fifty rows, in different orders: each row goes to one of them."""
    ids = [await table.a_row(f"k{n}") for n in range(50)]
    results = await asyncio.gather(*(table.claim(*(ids if n % 2 else reversed(ids))) for n in range(10)))
    won = [row["id"] for result in results for row in result]
    assert sorted(won) == ids
    assert await query(table.engine, "SELECT id FROM email_dispatches WHERE claim_no <> 1 OR attempts <> 1") == []


async def test_claims_are_only_looked_at_when_the_offset_moved(table: Table) -> None:
    """A fenced reader claims nothing more, and its outcomes are committed all the same (rule 14)."""
    async with table.sql() as sql:
        await offsets.create(sql, "mailer", PARTITION, 5)
    done, other = await table.a_row("done"), await table.a_row("other")
    claim_no = await table.claimed(done)
    stale = Advance("mailer", "recipients", 0, was=5, to=6, era=7, record_id="", record_ms=0)
    recorded = await table.record(sent(done, claim_no), advances=[stale], claims=[other])
    assert (recorded.in_place, recorded.claimed) == (False, [])
    assert (await table.get(done))["status"] == "sent"
    assert (await table.get(other))["claim_no"] == 0


async def test_outcome_offset_and_claim_are_one_commit_when_all_is_in_place(table: Table) -> None:
    """The offset moves with the outcome, and the slot goes on with the next row."""
    async with table.sql() as sql:
        await offsets.create(sql, "mailer", PARTITION, 5)
    done, other = await table.a_row("done"), await table.a_row("other", meta="'[1]'")
    move = Advance("mailer", "recipients", 0, was=5, to=6, era=0, record_id="id", record_ms=77)
    recorded = await table.record(sent(done, await table.claimed(done)), advances=[move], claims=[other])
    assert recorded.in_place
    assert [(row["id"], row["claim_no"], row["meta"]) for row in recorded.claimed] == [(other, 1, [1])]
    async with table.sql() as sql:
        position = await offsets.load(sql, "mailer", PARTITION)
    assert position is not None
    assert (position.next_offset, position.last_timestamp_ms) == (6, 77)


@pytest.mark.parametrize(("was", "era"), [(4, 0), (6, 0), (5, 1)])
async def test_an_offset_stays_when_it_is_not_where_its_reader_left_it(table: Table, was: int, era: int) -> None:
    """Another owner moved it, or a replay raised the epoch."""
    async with table.sql() as sql:
        await offsets.create(sql, "mailer", PARTITION, 5)
        move = Advance("mailer", "recipients", 0, was=was, to=was + 1, era=era, record_id="", record_ms=0)
        assert not await offsets.advance(sql, [move])
        position = await offsets.load(sql, "mailer", PARTITION)
    assert position is not None
    assert position.next_offset == 5


# ---- rules 6 and 7: exhaust


async def test_a_row_without_attempts_left_fails_when_it_is_asked_for(table: Table) -> None:
    """Rule 7: a record that kills its process is bounded by the attempts at claim."""
    row_id = await table.a_row(attempts="3", claim_no="3", error_message="'no route'")
    [failed] = await table.exhaust(row_id)
    assert (failed["id"], failed["claim_no"], failed["attempts"], failed["row_key"]) == (row_id, 3, 3, "k")
    row = await table.get(row_id)
    assert (row["status"], row["doubts"], row["held"]) == ("failed", 0, False)
    assert row["error_message"] == "attempts used up; last error: no route"
    assert (row["lease_until"], row["queued_until"], row["next_attempt_at"]) == (None, None, None)


async def test_the_last_outcome_is_unknown_when_the_last_try_died(table: Table) -> None:
    """Rule 7 with a lapsed lease: in doubt, and it says so."""
    row_id = await table.a_row(attempts="3", claim_no="3", lease_until=table.ago())
    assert await table.claim(row_id) == []
    [failed] = await table.exhaust(row_id)
    assert failed["error"] == f"attempts used up; {UNKNOWN}"
    row = await table.get(row_id)
    assert (row["doubts"], row["held"], row["lease_until"]) == (1, False, None)


async def test_a_row_that_may_still_be_tried_is_not_exhausted(table: Table) -> None:
    """Waiting, in flight, with attempts left, over: untouched."""
    ids = [
        await table.a_row("fresh"),
        await table.a_row("two", attempts="2"),
        await table.a_row("flies", attempts="3", lease_until=table.ahead()),
        await table.a_row("waits", attempts="3", next_attempt_at=table.ahead()),
        await table.a_row("sent", status="'sent'", attempts="3"),
    ]
    assert await table.exhaust(*ids) == []


async def test_hold_keeps_a_row_whose_holder_died(held_table: Table) -> None:
    """Rule 6: not claimed, but failed and held with its doubt; a bulk retry then leaves it alone."""
    row_id = await held_table.a_row(attempts="1", claim_no="1", lease_until=held_table.ago())
    assert await held_table.claim(row_id) == []
    [failed] = await held_table.exhaust(row_id)
    assert failed["held"]
    row = await held_table.get(row_id)
    assert (row["status"], row["held"], row["doubts"], row["error_message"]) == ("failed", True, 1, UNKNOWN)
    with pytest.raises(IntegrityError):
        await held_table.set(row_id, status="'pending'", attempts="0")


async def test_hold_claims_a_row_that_only_waited(held_table: Table) -> None:
    """A back-off that is over or a message under way is no doubt: the columns tell them from a death in flight."""
    waited = await held_table.a_row("waited", attempts="1", next_attempt_at=held_table.ago())
    queued = await held_table.a_row("queued", queued_until=held_table.ago())
    assert {row["id"] for row in await held_table.claim(waited, queued)} == {waited, queued}
    assert await held_table.exhaust(waited, queued) == []


# ---- rule 10: sent


async def test_sent_clears_what_the_try_left(table: Table) -> None:
    """Times and error go, the time of sending and what changed in the act are kept."""
    row_id = await table.a_row(error_message="'earlier'", attempts="1")
    claim_no = await table.claimed(row_id)
    recorded = await table.record(sent(row_id, claim_no, subject="new"))
    assert (recorded.failed, recorded.in_place) == ([], True)
    row = await table.get(row_id)
    assert (row["status"], row["subject"], row["content"], row["error_message"]) == ("sent", "new", "c", None)
    assert row["sent_at"] is not None
    assert row["dispatched_at"] is not None
    assert (row["attempts"], row["lease_until"], row["next_attempt_at"]) == (2, None, None)


async def test_sent_is_recorded_by_whichever_claim_has_it(table: Table) -> None:
    """A holder whose lease was lost to another says that it was sent: a fact, audited."""
    row_id = await table.a_row()
    old = await table.claimed(row_id)
    await table.set(row_id, lease_until=table.ago())
    new = await table.claimed(row_id)
    await table.record(sent(row_id, old))
    row = await table.get(row_id)
    assert (row["status"], row["lease_until"], row["claim_no"]) == ("sent", None, new)
    assert (await table.audits())[-1]["new"]["status"] == "sent"


@pytest.mark.parametrize("columns", [{"status": "'failed'"}, {"status": "'failed'", "held": "true"}])
async def test_a_late_sent_ends_what_was_given_up(table: Table, columns: dict[str, str]) -> None:
    """Failed or held meanwhile: it went out, so it is sent, and not held."""
    row_id = await table.a_row(**columns)
    await table.record(sent(row_id, 1))
    row = await table.get(row_id)
    assert (row["status"], row["held"]) == ("sent", False)


async def test_sent_is_final_when_it_is_said_twice(table: Table) -> None:
    """The second time changes nothing, not even the time of sending; a failure after it neither."""
    row_id = await table.a_row()
    claim_no = await table.claimed(row_id)
    await table.record(sent(row_id, claim_no))
    before = await table.get(row_id)
    await table.record(sent(row_id, claim_no, subject="other"))
    assert (await table.record(failure(row_id, claim_no))).failed == []
    assert await table.get(row_id) == before


# ---- rules 11 to 13: failure


async def test_a_failure_waits_for_its_back_off(table: Table) -> None:
    """Pending again, not before its time, with its error, free of lease and message."""
    row_id = await table.a_row()
    [ended] = (await table.record(failure(row_id, await table.claimed(row_id)))).failed
    assert ended["status"] == "pending"
    row = await table.get(row_id)
    assert (row["status"], row["attempts"], row["error_message"], row["doubts"]) == ("pending", 1, "refused", 0)
    assert row["next_attempt_at_ahead"]
    assert (row["lease_until"], row["queued_until"]) == (None, None)
    assert await table.claim(row_id) == []


async def test_a_failure_is_final_when_the_row_has_no_attempt_left(table: Table) -> None:
    """The third of three: failed, all times null, what a dead letter needs is answered."""
    row_id = await table.a_row(attempts="2", claim_no="2")
    [ended] = (await table.record(failure(row_id, await table.claimed(row_id)))).failed
    assert (ended["status"], ended["attempts"], ended["claim_no"], ended["error"]) == ("failed", 3, 3, "refused")
    row = await table.get(row_id)
    assert (row["next_attempt_at"], row["lease_until"], row["queued_until"]) == (None, None, None)


async def test_the_rows_own_attempts_decide_when_they_were_reset_in_flight(table: Table) -> None:
    """The holder began the last try; meanwhile a person asked for a new set, of which this try is the first."""
    row_id = await table.a_row(attempts="2", claim_no="2")
    claim_no = await table.claimed(row_id)
    await table.set(row_id, status="'pending'", attempts="0")
    [ended] = (await table.record(failure(row_id, claim_no))).failed
    assert (ended["status"], ended["attempts"]) == ("pending", 1)
    assert (await table.get(row_id))["error_message"] == "refused"


async def test_attempts_raised_beyond_the_limit_are_final(table: Table) -> None:
    """Beyond the end of the back-offs there is none."""
    row_id = await table.a_row()
    claim_no = await table.claimed(row_id)
    await table.set(row_id, attempts="9")
    [ended] = (await table.record(failure(row_id, claim_no))).failed
    assert (ended["status"], ended["attempts"]) == ("failed", 9)


async def test_only_the_holder_may_say_that_it_failed(table: Table) -> None:
    """H2: a stale failure is not written over a newer claim, although attempts are equal after a reset."""
    row_id = await table.a_row()
    old = await table.claimed(row_id)
    await table.set(row_id, attempts="0", lease_until=table.ago())
    new = await table.claimed(row_id)
    before = await table.get(row_id)
    assert (await table.record(failure(row_id, old))).failed == []
    assert await table.get(row_id) == before
    assert [row["id"] for row in (await table.record(failure(row_id, new))).failed] == [row_id]


async def test_a_failure_is_recorded_once_when_it_is_said_twice(table: Table) -> None:
    """A commit whose answer was lost is repeated: the lease is gone, so the second finds nothing to do."""
    row_id = await table.a_row()
    claim_no = await table.claimed(row_id)
    assert len((await table.record(failure(row_id, claim_no))).failed) == 1
    before = await table.get(row_id)
    assert (await table.record(failure(row_id, claim_no))).failed == []
    assert await table.get(row_id) == before


async def test_a_failure_of_a_lapsed_lease_is_recorded_while_nobody_else_claimed(table: Table) -> None:
    """The lease is still on the row: late, but the holder's."""
    row_id = await table.a_row()
    claim_no = await table.claimed(row_id)
    await table.set(row_id, lease_until=table.ago())
    assert len((await table.record(failure(row_id, claim_no))).failed) == 1


async def test_a_lost_reply_is_a_doubt_when_it_is_sent_again(table: Table) -> None:
    """Rule 13, resend: waits like any failure, and doubts says so; the audit has its line."""
    row_id = await table.a_row()
    await table.record(failure(row_id, await table.claimed(row_id), in_doubt=True))
    row = await table.get(row_id)
    assert (row["status"], row["doubts"]) == ("pending", 1)
    assert (await table.audits())[-1]["new"]["doubts"] == 1


async def test_a_lost_reply_is_held_when_the_mode_says_so(held_table: Table) -> None:
    """Rule 13, hold: failed whatever attempts are left."""
    row_id = await held_table.a_row()
    claim_no = await held_table.claimed(row_id)
    waits = (None, None, None)
    outcome = failure(row_id, claim_no, waits=waits, held=True, in_doubt=True, reason=OUTCOME_UNKNOWN)
    [ended] = (await held_table.record(outcome)).failed
    assert ended["held"]
    row = await held_table.get(row_id)
    assert (row["status"], row["held"], row["doubts"]) == ("failed", True, 1)


async def test_each_of_a_group_gets_its_own_outcome(table: Table) -> None:
    """Sent, again later, final and stale in one commit."""
    ids = [await table.a_row(f"k{n}") for n in range(4)]
    for row_id in ids:
        await table.claimed(row_id)
    outcomes = [sent(ids[0], 1), failure(ids[1], 1), failure(ids[2], 1, waits=(None,)), failure(ids[3], 9)]
    recorded = await table.record(*outcomes)
    assert {row["id"]: row["status"] for row in recorded.failed} == {ids[1]: "pending", ids[2]: "failed"}
    assert [(await table.get(row_id))["status"] for row_id in ids] == ["sent", "pending", "failed", "pending"]


# ---- rules 3 and 4: the relay


async def test_the_relay_reserves_what_is_due_and_nobody_has(table: Table) -> None:
    """Due, free, no message under way; each once."""
    due = [
        await table.a_row("due"),
        await table.a_row("waited", next_attempt_at=table.ago()),
        await table.a_row("lapsed", lease_until=table.ago()),
    ]
    for column in ("next_attempt_at", "lease_until", "queued_until"):
        await table.a_row(column, **{column: table.ahead()})
    for status in ("'sent'", "'failed'", "NULL"):
        await table.a_row(status.strip("'"), status=status)
    assert {row["id"] for row in await table.reserve()} == set(due)
    assert await table.reserve() == []
    assert (await table.get(due[0]))["queued_until_ahead"]


async def test_a_reservation_leaves_the_lease_where_it_was(table: Table) -> None:
    """H4: the trace of a lapsed lease survives until the claim counts it."""
    row_id = await table.a_row(lease_until=table.ago(), attempts="1", claim_no="1")
    await table.reserve()
    [claimed] = await table.claim(row_id)
    assert (claimed["attempts"], (await table.get(row_id))["doubts"]) == (2, 1)


async def test_two_relays_share_what_is_due(table: Table) -> None:
    """SKIP LOCKED: no row goes to both."""
    ids = {await table.a_row(f"k{n}") for n in range(20)}
    results = await asyncio.gather(*(table.reserve(10) for _ in range(4)))
    reserved = [row["id"] for result in results for row in result]
    assert len(reserved) == len(set(reserved))
    rest = [row["id"] for _ in range(3) for row in await table.reserve(10)]
    assert set(reserved) | set(rest) == ids


async def test_an_expired_reservation_is_repeated_once(table: Table) -> None:
    """Its message should have arrived long ago. One that is claimed, waits or is over meanwhile is not repeated."""
    over = await table.a_row("over", queued_until=table.ago())
    running = await table.a_row("running", queued_until=table.ago(), lease_until=table.ahead())
    waiting = await table.a_row("waiting", queued_until=table.ago(), next_attempt_at=table.ahead())
    done = await table.a_row("done", queued_until=table.ago(), status="'sent'")
    await table.a_row("under way", queued_until=table.ahead())
    async with table.sql() as sql:
        assert [row["id"] for row in await table.rows.expired(sql, 10)] == [over]
        assert [row["id"] for row in await table.rows.repeat(sql, [over, running, waiting, done])] == [over]
        assert await table.rows.repeat(sql, [over]) == []


async def test_what_was_not_confirmed_is_free_again(table: Table) -> None:
    """Rule 4: the reservation is taken back, and the next look finds the row."""
    row_id = await table.a_row()
    reserved = await table.reserve()
    async with table.sql() as sql:
        await table.rows.release(sql, reserved)
    assert [row["id"] for row in await table.reserve()] == [row_id]


async def test_a_release_takes_back_only_its_own_reservation(table: Table) -> None:
    """Claimed meanwhile, or reserved by another relay meanwhile: the other's mark stays."""
    claimed, again = await table.a_row("claimed"), await table.a_row("again")
    reserved = await table.reserve()
    await table.claimed(claimed)
    await table.set(claimed, queued_until=table.ahead(77))
    await table.set(again, queued_until=table.ahead(99))
    async with table.sql() as sql:
        await table.rows.release(sql, reserved)
    assert (await table.get(claimed))["queued_until"] is not None
    assert (await table.get(again))["queued_until"] is not None


# ---- rules 16 to 18: what people do


async def test_a_plain_update_of_a_failed_row_is_a_complete_retry(table: Table) -> None:
    """Rule 16: due at once, for the relay and for a claim, with a full set of attempts."""
    row_id = await table.a_row(attempts="2", claim_no="2")
    await table.record(failure(row_id, await table.claimed(row_id)))
    await table.set(row_id, status="'pending'", attempts="0")
    assert [row["id"] for row in await table.reserve()] == [row_id]
    [claimed] = await table.claim(row_id)
    assert (claimed["claim_no"], claimed["attempts"]) == (4, 1)


@pytest.mark.parametrize("more", [{}, {"next_attempt_at": "NULL"}])
async def test_a_plain_update_of_a_row_in_flight_starts_nothing(table: Table, more: dict[str, str]) -> None:
    """Rule 17: never a second holder; also not when next_attempt_at is set to null with it."""
    row_id = await table.a_row()
    claim_no = await table.claimed(row_id)
    await table.set(row_id, status="'pending'", attempts="0", **more)
    assert await table.claim(row_id) == []
    assert await table.reserve() == []
    await table.record(sent(row_id, claim_no))
    assert (await table.get(row_id))["status"] == "sent"


async def test_a_plain_update_of_a_waiting_row_gives_it_a_new_set(table: Table) -> None:
    """Rule 17: with its time set to null it is due now."""
    row_id = await table.a_row(attempts="2", next_attempt_at=table.ahead())
    await table.set(row_id, attempts="0")
    assert await table.claim(row_id) == []
    await table.set(row_id, next_attempt_at="NULL")
    [claimed] = await table.claim(row_id)
    assert claimed["attempts"] == 1


async def test_a_sent_row_refuses_to_be_sent_again_by_a_plain_update(table: Table) -> None:
    """Rule 18: the table refuses; on purpose, with sent_at = NULL, it works."""
    row_id = await table.a_row()
    await table.record(sent(row_id, await table.claimed(row_id)))
    with pytest.raises(IntegrityError, match="pending_never_sent_nor_held"):
        await table.set(row_id, status="'pending'", attempts="0")
    await table.set(row_id, status="'pending'", attempts="0", sent_at="NULL")
    assert [row["id"] for row in await table.claim(row_id)] == [row_id]


# ---- a person's open transaction (PostgreSQL: rows are locked one by one)


@asynccontextmanager
async def locked(url: str, row_id: int) -> AsyncIterator[None]:
    """psql: BEGIN; UPDATE one row; lunch; ROLLBACK at the end of the block."""
    person = connect(url, "psql")
    try:
        async with person.connect() as connection, connection.begin() as transaction:
            await connection.execute(text("UPDATE email_dispatches SET subject = 'x' WHERE id = :id"), {"id": row_id})
            yield
            await transaction.rollback()
    finally:
        await person.dispose()


async def test_a_claim_skips_a_row_that_a_person_has_locked(postgres: AsyncEngine, postgres_database: str) -> None:
    """The others are claimed at once, the locked one when it is free."""
    table = Table(postgres)
    ids = [await table.a_row(f"k{n}") for n in range(3)]
    async with locked(postgres_database, ids[1]):
        assert {row["id"] for row in await table.claim(*ids)} == {ids[0], ids[2]}
        assert await table.exhaust(ids[1]) == []
    assert [row["id"] for row in await table.claim(*ids)] == [ids[1]]


async def test_the_relay_skips_a_row_that_a_person_has_locked(postgres: AsyncEngine, postgres_database: str) -> None:
    """The others are reserved."""
    table = Table(postgres)
    ids = [await table.a_row(f"k{n}") for n in range(3)]
    async with locked(postgres_database, ids[1]):
        assert {row["id"] for row in await table.reserve()} == {ids[0], ids[2]}


# ---- the plans


async def plan_of(engine: AsyncEngine, statement: str, *arguments: object) -> str:
    """EXPLAIN as a prepared statement gets it."""
    database = Database(engine, 5.0)
    async with database.open() as sql:
        lines = await sql.fetch(f"EXPLAIN {statement}", *arguments)
    return "\n".join(line["QUERY PLAN"] for line in lines)


@pytest.mark.parametrize("analysed", [False, True], ids=["never analysed", "analysed"])
async def test_no_statement_of_a_turn_scans_the_table(postgres: AsyncEngine, analysed: bool) -> None:
    """3,000 pending rows of 6,000: each statement goes by its ids, whatever the planner knows of the table."""
    table = Table(postgres)
    await query(postgres, "ALTER TABLE email_dispatches SET (autovacuum_enabled = off)")
    await query(
        postgres,
        """INSERT INTO email_dispatches ("to", subject, content, mailable_type, status, idempotency_key)
        SELECT 'a@example.com', 's', repeat('c', 500), 'm', CASE WHEN n % 2 = 0 THEN 'pending' ELSE 'sent' END, 'k' || n
        FROM generate_series(1, 6000) AS n""",
    )
    if analysed:
        async with postgres.connect() as connection:
            await (await connection.execution_options(isolation_level="AUTOCOMMIT")).execute(text("ANALYZE"))
    async with table.sql() as sql:
        await offsets.create(sql, "mailer", PARTITION, 0)
    ids = json.dumps([{"row_id": n} for n in range(2, 34, 2)])
    moves = json.dumps([Advance("mailer", "recipients", 0, 0, 1, 0, "", 0)._asdict()])
    waits = [{"row_id": 2, "fence": 0, "failure": "e", "waits": [1.0, None], "hold": False, "doubt": 0}]
    rows = table.rows
    plans = {
        "group": await plan_of(postgres, rows._group, ids, moves, ids, 1, []),
        "claim": await plan_of(postgres, rows._claim, ids, []),
        "exhaust": await plan_of(postgres, rows._exhaust, ids),
        "fail": await plan_of(postgres, rows._fail, json.dumps(waits)),
        "repeat": await plan_of(postgres, rows._repeat, ids),
        "states": await plan_of(postgres, rows._state, json.dumps([{"row_id": 4, "row_key": "k4"}])),
    }
    for name, plan in plans.items():
        assert "Seq Scan on email_dispatches" not in plan, f"{name}:\n{plan}"
        assert "ix_email_dispatches_due" not in plan, f"{name}:\n{plan}"
        assert "pk_email_dispatches" in plan or "email_dispatches_pkey" in plan, f"{name}:\n{plan}"


# ---- deferring


async def test_a_deferred_row_waits_and_no_try_is_counted(table: Table) -> None:
    """Its provider is away: not before then, and the relay may publish it then."""
    row_id = await table.a_row(queued_until=table.ahead())
    async with table.sql() as sql:
        await table.rows.defer(sql, [(row_id, 30.0)])
    row = await table.get(row_id)
    assert (row["status"], row["attempts"], row["claim_no"], row["queued_until"]) == ("pending", 0, 0, None)
    assert row["next_attempt_at_ahead"]
    assert await table.claim(row_id) == []


@pytest.mark.parametrize("state", [{"status": "'failed'"}, {"lease_until": "ahead"}, {"next_attempt_at": "ahead"}])
async def test_nothing_is_deferred_that_is_not_due(table: Table, state: dict[str, str]) -> None:
    """Failed, in flight, or waiting already: what the row says stays."""
    columns = {name: table.ahead() if value == "ahead" else value for name, value in state.items()}
    row_id = await table.a_row(**columns)
    before = await table.get(row_id)
    async with table.sql() as sql:
        await table.rows.defer(sql, [(row_id, 3000.0)])
    assert await table.get(row_id) == before
