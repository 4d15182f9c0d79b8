"""Rows that a processor writes in the transaction of its outcomes: with `sent` or not at all, and once."""

from collections.abc import Mapping, Sequence

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from streams.errors import Reject, Retry
from streams.processor import Claim, Gate
from streams.sql import Sql
from streams.testing import MemoryLog
from tests.support.databases import from_now
from tests.support.engine import Scripted, Stage, first, hint, running

KEYS = [f"k{n}" for n in range(10)]


class Recording(Scripted):
    """Writes one audit for each row that is sent, unless the test says what goes wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses: dict[str, list[Exception | None]] = {}
        """For a key what its next records raise, one each; None is an error of the database itself."""
        self.cuts = 0
        """So many records end the connection that they are on."""

    async def _act(self, key: str, gate: Gate) -> Mapping[str, object]:
        waits = self._blocked.pop(key, None)  # the first act of a key only
        if waits is not None:
            await waits.wait()
        await super()._act(key, gate)
        return {"key": key}

    async def record(self, sql: Sql, done: Sequence[tuple[Claim, Mapping[str, object]]]) -> None:
        for claim, facts in done:
            await self._write(sql, claim.row_id, facts["key"])
            if self.cuts:
                self.cuts -= 1
                await sql.fetch("SELECT pg_terminate_backend(pg_backend_pid())")
            if self.refuses.get(str(claim.key)):
                error = self.refuses[str(claim.key)].pop(0)
                if error is not None:
                    raise error
                await self._write(sql, claim.row_id, None)

    async def _write(self, sql: Sql, row_id: int, event: object) -> None:
        await sql.fetch(
            "INSERT INTO audits (event, auditable_type, auditable_id) VALUES ($1, 'recorded', $2)", event, row_id
        )


class Recorded(Stage):
    """A stage whose processor records."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine, MemoryLog())
        self.recording = self.processor = Recording()

    async def written(self) -> list[str]:
        """The keys of which something is recorded."""
        rows = await self.query("SELECT event FROM audits WHERE auditable_type = 'recorded' ORDER BY event")
        return [row["event"] for row in rows]


@pytest.fixture
async def stage(engine: AsyncEngine) -> Recorded:
    """One partition, and few slots."""
    stage = Recorded(engine)
    await stage.declare()
    return stage


async def test_further_rows_commit_with_their_outcome_when_a_processor_records(stage: Recorded) -> None:
    """Each once, whatever the groups; what was not sent has none."""
    stage.processor.errors["k3"] = [Reject("no", "no")]
    await stage.publish(*map(first, [*KEYS, *KEYS]))
    async with running(stage.runtime()):
        await stage.offset_is(20)
        await stage.status("k3", "failed")
        await stage.status("k9", "sent")
    assert await stage.written() == [key for key in KEYS if key != "k3"]


@pytest.mark.parametrize("error", [None, Retry("not now"), RuntimeError("a fault of ours")], ids=repr)
async def test_one_row_alone_fails_an_attempt_when_its_record_is_refused(
    stage: Recorded, error: Exception | None
) -> None:
    """The others of its group are sent; it is tried again, and nothing of the refused record is left."""
    stage.recording.refuses["k1"] = [error] * 2  # in its group, and apart
    stage.processor.all_may_go.clear()
    await stage.publish(*map(first, KEYS))
    async with running(stage.runtime(), stage.relay()):
        await stage.begun(*KEYS[:4])
        stage.processor.all_may_go.set()
        await stage.all_sent(KEYS)
    row = await stage.row("k1")
    assert (row["attempts"], row["doubts"], stage.processor.sent["k1"]) == (2, 0, 2)
    assert {count for key, count in stage.processor.sent.items() if key != "k1"} == {1}
    assert await stage.written() == KEYS


async def test_row_is_failed_with_a_dead_letter_when_its_record_is_refused_every_time(stage: Recorded) -> None:
    """As many attempts as any failure has; the process lives, and the offset passes it."""
    stage.recording.refuses["a"] = [None] * 20
    await stage.publish(first("a"), first("b"))
    async with running(stage.runtime(), stage.relay()):
        row = await stage.status("a", "failed")
        await stage.status("b", "sent")
    assert row["attempts"] == 3
    assert row["error_message"].startswith("done, but what belongs to it could not be written: ")
    [letter] = await stage.dead_letters()
    assert (letter["reason"], letter["row_id"]) == ("attempts_used_up", row["id"])
    assert await stage.written() == ["b"]


async def test_row_is_failed_at_once_when_its_record_rejects(stage: Recorded) -> None:
    """With the reason that the processor gives."""
    stage.recording.refuses["a"] = [Reject("paid_already", "somebody was faster")] * 2
    await stage.publish(first("a"))
    async with running(stage.runtime()):
        row = await stage.status("a", "failed")
    assert (row["attempts"], row["error_message"]) == (1, "paid_already: somebody was faster")
    [letter] = await stage.dead_letters()
    assert letter["reason"] == "paid_already"
    assert await stage.written() == []


async def test_second_sent_writes_nothing_when_two_claims_of_a_row_end_well(stage: Recorded) -> None:
    """A holder whose lease has passed comes late: both sent, recorded once."""
    late = stage.processor.block("a")
    await stage.publish(first("a"))
    async with running(stage.runtime()):
        await stage.begun("a")
        await stage.until(lambda: _is(len(stage.processor.claims), 1))
        row = await stage.row("a")
        past = from_now(stage.engine, -1)
        await stage.query(f"UPDATE email_dispatches SET lease_until = {past} WHERE id = :id", id=row["id"])
        await stage.publish(hint(row["id"]))
        await stage.status("a", "sent")
        late.set()
        await stage.until(lambda: _is(stage.processor.sent["a"], 2))
        await stage.offset_is(2)
    assert (await stage.row("a"))["claim_no"] == 2
    assert await stage.written() == ["a"]


async def test_what_went_out_is_recorded_when_the_row_was_failed_meanwhile(stage: Recorded) -> None:
    """A fact stays a fact, with all that belongs to it."""
    waits = stage.processor.block("a")
    await stage.publish(first("a"))
    async with running(stage.runtime()):
        await stage.begun("a")
        await stage.query("UPDATE email_dispatches SET status = 'failed'")
        waits.set()
        await stage.status("a", "sent")
    assert await stage.written() == ["a"]


async def test_nothing_is_lost_or_written_twice_when_the_connection_breaks_in_a_record(postgres: AsyncEngine) -> None:
    """A database that is away is waited for, and costs no attempt."""
    stage = Recorded(postgres)
    await stage.declare()
    stage.recording.cuts = 2
    await stage.publish(*map(first, KEYS))
    async with running(stage.runtime()):
        await stage.all_sent(KEYS)
    assert await stage.written() == KEYS
    assert set(stage.processor.sent.values()) == {1}
    assert await stage.count("attempts <> 1 OR doubts > 0") == 0


def _is(value: object, wanted: object) -> None:
    assert value == wanted
