"""A row processor as it runs: every record once, resets by hand, deaths, slots, the provider away."""

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from streams import processor as declaration
from streams.assignment import Assignment
from streams.breaker import BreakerPolicy
from streams.errors import Reject, Retry
from streams.log import StreamSpec
from streams.recorder import Recorder
from streams.recovery import OnUnknown, RecoveryPolicy
from streams.rows import Rows
from streams.runtime import Runtime
from streams.testing import MemoryLog, eventually
from tests.support.databases import from_now
from tests.support.engine import STREAM, Stage, crash, first, hint, running

KEYS = [f"k{n}" for n in range(10)]
LONG = RecoveryPolicy(max_attempts=3, backoff=(600.0,), jitter=0.0)


async def lapse(stage: Stage) -> None:
    """Let every lease, back-off and reservation be over, as time does."""
    for column in ("lease_until", "next_attempt_at", "queued_until"):
        await stage.query(
            f"UPDATE email_dispatches SET {column} = {from_now(stage.engine, -1)} WHERE {column} IS NOT NULL"
        )


async def killed(stage: Stage, *keys: str) -> None:
    """Run until acts of these keys are under way, then die; time passes and the log is as it was."""
    task = asyncio.create_task(stage.runtime().run(asyncio.Event()))
    await stage.begun(*keys)
    await crash(task, stage.log)
    await lapse(stage)


# ---- every record once


async def test_every_record_is_acted_on_once_and_the_offset_moves_past_it(stage: Stage) -> None:
    """More records than slots and than a turn takes."""
    keys = [f"k{n}" for n in range(120)]
    await stage.publish(*map(first, keys))
    async with running(stage.runtime()):
        await stage.all_sent(keys)
        await stage.offset_is(120)
    assert set(stage.processor.sent.values()) == {1}
    assert stage.processor.most_running <= stage.limits.slots
    assert await stage.count("attempts <> 1 OR claim_no <> 1 OR doubts <> 0 OR lease_until IS NOT NULL") == 0


async def test_nothing_happens_when_the_same_records_come_again(stage: Stage) -> None:
    """Redelivered after all are sent: no act, no new row; the processor gets to know of each."""
    await stage.publish(*map(first, KEYS))
    async with running(stage.runtime()):
        await stage.all_sent(KEYS)
        await stage.publish(*map(first, KEYS))
        await stage.offset_is(20)
    assert sum(stage.processor.sent.values()) == 10
    assert sorted(stage.processor.known_keys) == KEYS


async def test_a_key_twice_in_one_turn_is_one_row(stage: Stage) -> None:
    """Both records are in the same take."""
    await stage.publish(first("a"), first("b"), first("a"), first("a"))
    async with running(stage.runtime()):
        await stage.all_sent(["a", "b"])
        await stage.offset_is(4)
    assert stage.processor.sent == {"a": 1, "b": 1}


async def test_a_hint_at_a_row_that_is_gone_is_passed_over(stage: Stage) -> None:
    """Only a first message may insert a row."""
    await stage.publish(hint(4711), first("a"))
    async with running(stage.runtime()):
        await stage.all_sent(["a"])
        await stage.offset_is(2)
    assert await stage.count("true") == 1


async def test_hints_are_settled_whatever_their_rows_say(stage: Stage) -> None:
    """In one small turn: due, due and named twice, sent, waiting for its time, in flight elsewhere, used up, gone."""
    states = {
        "due": "'pending', NULL, NULL, 0",
        "twice": "'pending', NULL, NULL, 0",
        "sent": "'sent', NULL, NULL, 1",
        "later": f"'pending', {from_now(stage.engine, 60)}, NULL, 1",
        "elsewhere": f"'pending', NULL, {from_now(stage.engine, 60)}, 1",
        "used up": "'pending', NULL, NULL, 3",
    }
    ids = {}
    for key, state in states.items():
        [row] = await stage.query(
            f"""INSERT INTO email_dispatches ("to", subject, content, mailable_type, idempotency_key, status,
            next_attempt_at, lease_until, attempts) VALUES ('x@example.com', 's', 'c', 'm', '{key}', {state})
            RETURNING id"""
        )
        ids[key] = row["id"]
    stage.change(slots=8, in_doubt=8)
    hints = [*ids.values(), ids["twice"], 4711]
    await stage.publish(*map(hint, hints))
    async with running(stage.runtime()):
        await stage.offset_is(len(hints))
        await stage.status("due", "sent")
        await stage.status("twice", "sent")
        await stage.status("used up", "failed")
    assert stage.processor.sent == {"due": 1, "twice": 1}
    assert await stage.count("claim_no > 0") == 2
    assert [letter["reason"] for letter in await stage.dead_letters()] == ["attempts_used_up"]


@pytest.mark.parametrize("key", ["k2", "k1"])
async def test_one_failure_is_tried_again_alone(stage: Stage, key: str) -> None:
    """A batch in which one send fails: each of the others gets exactly one mail, and the one another try."""
    await stage.publish(*map(first, KEYS[:5]))
    stage.processor.errors[key] = [Retry("451 later")]
    async with running(stage.runtime(), stage.relay()):
        await stage.all_sent(KEYS[:5])
    assert set(stage.processor.sent.values()) == {1}
    assert {k: stage.processor.acts(k) for k in KEYS[:5]} == {k: 2 if k == key else 1 for k in KEYS[:5]}


async def test_a_row_fails_when_its_attempts_are_used_up(stage: Stage) -> None:
    """Three acts, attempts true at all times, then failed with its error and one dead letter of the row."""
    stage.processor.always["a"] = Retry("451 later")
    await stage.publish(first("a"))
    async with running(stage.runtime(), stage.relay()):
        row = await stage.status("a", "failed")
    assert (row["attempts"], row["claim_no"], row["error_message"], row["doubts"]) == (3, 3, "451 later", 0)
    assert [claim.attempts for claim in stage.processor.claims] == [1, 2, 3]
    [letter] = await stage.dead_letters()
    assert (letter["reason"], letter["table_name"], letter["row_id"]) == (
        "attempts_used_up",
        "email_dispatches",
        row["id"],
    )
    assert (letter["claim_no"], letter["message_key"], letter["attempts"], letter["body"]) == (3, "a", 3, None)


async def test_a_rejected_row_is_not_tried_again(stage: Stage) -> None:
    """Final at once, with its own reason."""
    stage.processor.always["a"] = Reject("bad_address", "it has two")
    await stage.publish(first("a"), first("b"))
    async with running(stage.runtime(), stage.relay()):
        row = await stage.status("a", "failed")
        await stage.status("b", "sent")
    assert (row["attempts"], stage.processor.acts("a")) == (1, 1)
    assert [letter["reason"] for letter in await stage.dead_letters()] == ["bad_address"]


async def test_columns_that_an_act_changed_are_kept_with_sent(stage: Stage) -> None:
    """The row says what was really sent."""
    stage.processor.stored["a"] = {"subject": "as sent"}
    await stage.publish(first("a"))
    async with running(stage.runtime()):
        row = await stage.status("a", "sent")
    assert (row["subject"], row["content"]) == ("as sent", "c")


async def test_a_plain_update_sends_a_failed_row_once_more(stage: Stage) -> None:
    """By SQL while all runs: once, with a full set of attempts."""
    stage.processor.always["a"] = Reject("no", "no")
    await stage.publish(first("a"))
    async with running(stage.runtime(), stage.relay()):
        failed = await stage.status("a", "failed")
        stage.processor.always.clear()
        await stage.query(
            "UPDATE email_dispatches SET status = 'pending', attempts = 0 WHERE id = :id", id=failed["id"]
        )
        row = await stage.status("a", "sent")
    assert (row["attempts"], row["claim_no"], stage.processor.sent["a"]) == (1, 2, 1)


# ---- resets and duplicates while a row is busy


async def test_reset_of_a_row_in_flight_sends_no_second_mail(stage: Stage) -> None:
    """H1: the holder lost the log but lives; another process reads the same record after a person's reset."""
    may_go = stage.processor.block("a")
    other_log = MemoryLog()
    await other_log.declare(StreamSpec(STREAM, 1))
    elsewhere = Stage(stage.engine, other_log)
    elsewhere.processor = stage.processor
    await stage.publish(first("a"))
    await elsewhere.publish(first("a"), first("z"))
    async with running(stage.runtime()):
        await stage.begun("a")
        await stage.query("UPDATE email_dispatches SET status = 'pending', attempts = 0, next_attempt_at = NULL")
        async with running(elsewhere.runtime()):
            await elsewhere.publish(first("a"), hint((await stage.row("a"))["id"]))
            await stage.status("z", "sent")
            await elsewhere.offset_is(4)
            may_go.set()
            await stage.status("a", "sent")
    assert stage.processor.sent == {"a": 1, "z": 1}
    assert stage.processor.acts("a") == 1


async def test_a_duplicate_starts_no_early_attempt_while_a_row_waits(stage: Stage) -> None:
    """H1: the first message comes again during the back-off, and a hint too."""
    stage.change(recovery=LONG)
    stage.processor.errors["a"] = [Retry("451 later")]
    await stage.publish(first("a"))
    async with running(stage.runtime(), stage.relay()):
        await stage.offset_is(1)
        await stage.publish(first("a"), hint((await stage.row("a"))["id"]), first("b"))
        await stage.status("b", "sent")
        await stage.offset_is(4)
    assert stage.processor.acts("a") == 1
    assert (await stage.row("a"))["attempts"] == 1


async def test_the_failure_of_a_try_that_was_reset_is_the_first_of_the_new_set(stage: Stage) -> None:
    """H2, H10: its error is kept, and the limit as the holder remembers it does not undo the reset."""
    stage.change(recovery=LONG)
    may_go = stage.processor.block("a")
    stage.processor.errors["a"] = [Retry("451 later")]
    [row] = await stage.query(
        """INSERT INTO email_dispatches ("to", subject, content, mailable_type, status, idempotency_key, attempts)
        VALUES ('x@example.com', 's', 'c', 'm', 'pending', 'a', 2) RETURNING id"""
    )
    await stage.publish(hint(row["id"]))
    async with running(stage.runtime()):
        await stage.begun("a")
        assert [claim.attempts for claim in stage.processor.claims] == [3]
        await stage.query("UPDATE email_dispatches SET status = 'pending', attempts = 0")
        may_go.set()
        await stage.offset_is(1)
    row = await stage.row("a")
    assert (row["status"], row["attempts"], row["error_message"]) == ("pending", 1, "451 later")
    assert await stage.dead_letters() == []


async def test_a_retry_does_not_wait_for_the_visibility(stage: Stage) -> None:
    """H3: the relay marks before it publishes, and a claim takes the mark away."""
    stage.change(visibility=600.0)
    stage.processor.errors["a"] = [Retry("451 later"), Retry("451 later")]
    await stage.publish(first("a"))
    async with running(stage.runtime(), stage.relay()):
        row = await stage.status("a", "sent")
    assert (row["attempts"], row["doubts"], stage.processor.sent["a"]) == (3, 0, 1)


# ---- deaths


async def test_a_row_whose_process_died_is_tried_again_and_in_doubt(stage: Stage) -> None:
    """Nothing is lost; only the one that was in flight is in doubt."""
    stage.processor.block("k1")
    await stage.publish(*map(first, KEYS))
    await killed(stage, "k1")
    stage.processor.block("k1").set()
    async with running(stage.runtime(), stage.relay()):
        await stage.all_sent(KEYS)
    rows = await stage.query("SELECT idempotency_key, attempts FROM email_dispatches WHERE doubts > 0")
    assert "k1" in {row["idempotency_key"] for row in rows}
    assert len(rows) <= stage.limits.slots
    assert {row["attempts"] for row in rows} == {2}


async def test_hold_sends_nothing_twice_when_a_process_died(stage: Stage) -> None:
    """H4: only what was claimed is held; what waited for a slot or for its time is sent."""
    stage.change(recovery=replace(stage.limits.recovery, on_unknown=OnUnknown.HOLD))
    stage.processor.errors["k9"] = [Retry("451 later")]
    stage.processor.all_may_go.clear()
    await stage.publish(*map(first, KEYS))
    await killed(stage, *KEYS[:4])
    stage.processor.all_may_go.set()
    async with running(stage.runtime(), stage.relay()):
        for key in KEYS[4:]:
            await stage.status(key, "sent")
        for key in KEYS[:4]:
            row = await stage.status(key, "failed")
            assert (row["held"], row["doubts"], row["attempts"]) == (True, 1, 1)
        await stage.offset_is((await stage.log.bounds((await stage.log.partitions(STREAM))[0])).next)
    assert set(stage.processor.sent) == set(KEYS[4:])
    assert {letter["reason"] for letter in await stage.dead_letters()} == {"outcome_unknown"}
    assert len(await stage.dead_letters()) == 4


async def test_a_lost_reply_is_held_in_mode_hold(stage: Stage) -> None:
    """Rule 13 as it runs: one act, failed, held, one dead letter."""
    stage.change(recovery=replace(stage.limits.recovery, on_unknown=OnUnknown.HOLD))
    stage.processor.always["a"] = Retry("no reply", in_doubt=True)
    await stage.publish(first("a"))
    async with running(stage.runtime(), stage.relay()):
        row = await stage.status("a", "failed")
    assert (row["held"], row["doubts"], stage.processor.acts("a")) == (True, 1, 1)
    assert [letter["reason"] for letter in await stage.dead_letters()] == ["outcome_unknown"]


async def test_a_row_that_kills_its_process_is_bounded_by_the_attempts(stage: Stage) -> None:
    """H5: three deaths in its act, then failed without a fourth; the message alone would go on for ever."""
    stage.processor.block("a")
    await stage.publish(first("a"))
    for death in range(3):
        if death:
            await stage.publish(hint((await stage.row("a"))["id"]))
        await killed(stage, "a")
    async with running(stage.runtime(), stage.relay()):
        row = await stage.status("a", "failed")
    assert (row["attempts"], row["claim_no"], row["doubts"], row["held"]) == (3, 3, 3, False)
    assert stage.processor.acts("a") == 3
    assert [letter["reason"] for letter in await stage.dead_letters()] == ["attempts_used_up"]


async def test_a_kill_counts_at_most_one_attempt_for_each_slot(stage: Stage) -> None:
    """H6: claimed = started. What waits for a slot has not been tried."""
    stage.processor.all_may_go.clear()
    await stage.publish(*map(first, [f"k{n}" for n in range(40)]))
    task = asyncio.create_task(stage.runtime().run(asyncio.Event()))
    await stage.begun("k0", "k1", "k2", "k3")

    async def all_are_planned() -> None:
        assert await stage.count("true") == 40

    await eventually(all_are_planned)
    await crash(task, stage.log)
    assert await stage.count("lease_until IS NOT NULL") == 4
    assert await stage.count("attempts > 0") == 4
    assert (await stage.position())["next_offset"] == 0


async def test_a_slot_goes_on_only_after_its_outcome_is_committed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a commit is slow, new records must not be claimed for the slots whose outcomes it holds."""
    may_commit, asked = asyncio.Event(), asyncio.Event()
    record = Rows.record

    async def slow(self: Rows, sql: object, outcomes: object, *rest: object) -> object:
        if outcomes:
            asked.set()
            await may_commit.wait()
        return await record(self, sql, outcomes, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Rows, "record", slow)
    # planning of the second turn must not wait for the slow commit: SQLite has one writer, but it is not writing yet
    monkeypatch.setattr(Recorder, "_commit_once", _without_transaction)
    await stage.publish(*map(first, KEYS[:4]))
    async with running(stage.runtime()):
        await asked.wait()
        await stage.publish(*map(first, KEYS[4:]))

        async def all_are_planned() -> None:
            assert await stage.count("true") == 10

        await eventually(all_are_planned)
        assert await stage.count("lease_until IS NOT NULL") <= 4
        may_commit.set()
        await stage.all_sent(KEYS)
    assert set(stage.processor.sent.values()) == {1}


async def _without_transaction(self: Recorder, sql: object, group: object) -> object:
    moves = [move for _, move, _ in group.advances]  # type: ignore[attr-defined]
    ids = [candidate.row_id for _, candidate in group.claims]  # type: ignore[attr-defined]
    return await self._rows.record(sql, group.outcomes, moves, ids)  # type: ignore[attr-defined, arg-type]


async def test_a_holder_that_overslept_its_lease_sends_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """H15: right before the dot it looks at its own clock. Nothing is recorded; the row comes back later."""
    real = declaration.clock
    may_go = stage.processor.block("a")
    await stage.publish(first("a"))
    async with running(stage.runtime(), stage.relay()):
        await stage.begun("a")
        monkeypatch.setattr(declaration, "clock", lambda: real() + stage.limits.lease)
        may_go.set()
        await stage.offset_is(1)
        monkeypatch.setattr(declaration, "clock", real)
        assert stage.processor.sent["a"] == 0
        row = await stage.row("a")
        assert (row["status"], row["attempts"], row["lease_until"] is None) == ("pending", 1, False)
        await lapse(stage)
        row = await stage.status("a", "sent")
    assert (stage.processor.sent["a"], row["attempts"], row["doubts"]) == (1, 2, 1)


# ---- exceptions of ours


async def test_nine_of_ten_are_sent_when_plan_raises_on_the_third(stage: Stage) -> None:
    """O-19: an exception of an unexpected type; the third is a dead letter with its bytes, the offset passes all."""
    stage.processor.impossible["k2"] = ZeroDivisionError("oops")
    await stage.publish(*map(first, KEYS))
    rest = [key for key in KEYS if key != "k2"]
    async with running(stage.runtime()):
        await stage.all_sent(rest)
        await stage.offset_is(10)
    [letter] = await stage.dead_letters()
    assert (letter["reason"], letter["source_offset"], bytes(letter["body"])) == ("unexpected_error", 2, first("k2"))


async def test_nine_of_ten_are_sent_when_act_raises_on_the_third(stage: Stage) -> None:
    """O-19: the third is tried again like any failure, then failed; what raised after the gate is in doubt."""
    stage.processor.always["k2"] = ZeroDivisionError("oops")
    await stage.publish(*map(first, KEYS))
    async with running(stage.runtime(), stage.relay()):
        for key in KEYS:
            await stage.status(key, "failed" if key == "k2" else "sent")
    assert (await stage.row("k2"))["error_message"] == "ZeroDivisionError: oops"
    assert set(stage.processor.sent.values()) == {1}


async def test_what_cannot_be_decoded_is_a_dead_letter(stage: Stage) -> None:
    """Bytes that are no message, kept as they came; once, although they come again."""
    await stage.publish(first("a"), b"\xff\x00 no message", first("b"))
    async with running(stage.runtime()):
        await stage.all_sent(["a", "b"])
        await stage.offset_is(3)
    [letter] = await stage.dead_letters()
    assert (letter["reason"], bytes(letter["body"])) == ("undecodable", b"\xff\x00 no message")


async def test_the_database_refuses_one_record_of_a_turn_alone(stage: Stage) -> None:
    """Poison: a value that the table refuses. One dead letter, all others of the turn are sent."""
    stage.processor.values["k3"] = {"to": None}
    await stage.publish(*map(first, KEYS))
    rest = [key for key in KEYS if key != "k3"]
    async with running(stage.runtime()):
        await stage.all_sent(rest)
        await stage.offset_is(10)
    [letter] = await stage.dead_letters()
    assert (letter["reason"], letter["source_offset"]) == ("unexpected_error", 3)
    assert set(stage.processor.sent.values()) == {1}


@pytest.mark.parametrize("strange", ["nul\x00byte", "lone \ud800 surrogate", "ü" * 5000])
async def test_strange_text_in_an_error_ends_no_process(stage: Stage, strange: str) -> None:
    """A reply of a broken server: what the database cannot store is replaced, and the outcome is recorded."""
    stage.processor.always["a"] = Reject("refused", strange)
    stage.processor.errors["b"] = [Retry(strange)]
    await stage.publish(first("a"), first("b"))
    async with running(stage.runtime(), stage.relay()):
        await stage.status("a", "failed")
        await stage.status("b", "sent")
    assert len(await stage.dead_letters()) == 1


@pytest.mark.parametrize("strange", ["nul\x00byte", "long" * 5000])
async def test_a_strange_message_id_ends_no_process(stage: Stage, strange: str) -> None:
    """The id of the last record is kept beside the offset, whatever its publisher wrote."""
    stage.processor.impossible[strange] = Reject("bad_message", f"{strange!r:.20}")
    await stage.publish(first(strange), first("b"))
    async with running(stage.runtime()):
        await stage.status("b", "sent")
        await stage.offset_is(2)
    assert [letter["reason"] for letter in await stage.dead_letters()] == ["bad_message"]


@pytest.mark.parametrize("meta", ['"no object"', "null", "[1]", '"{\\"n\\": 1}"'])
async def test_odd_json_in_an_old_row_ends_no_process(stage: Stage, meta: str) -> None:
    """What the old service stored is the act's to judge: claimed in plan, and by the recorder."""
    stage.change(slots=1)
    rows = await stage.query(
        """INSERT INTO email_dispatches ("to", subject, content, mailable_type, status, idempotency_key, meta)
        VALUES ('x@example.com', 's', 'c', 'm', 'pending', 'a', :meta),
            ('x@example.com', 's', 'c', 'm', 'pending', 'b', :meta) RETURNING id""",
        meta=meta,
    )
    await stage.publish(*(hint(row["id"]) for row in rows))
    async with running(stage.runtime()):
        await stage.all_sent(["a", "b"])


# ---- a record that kills its reader


class Killed(BaseException):
    """What a test raises where a process would die."""


async def test_a_record_that_kills_its_reader_is_isolated_and_laid_to_rest(stage: Stage) -> None:
    """In plan, before any claim: after starts without progress it is read alone, and then not any more."""
    stage.processor.impossible["k3"] = Killed()  # type: ignore[assignment]
    await stage.publish(*map(first, KEYS))
    deaths = 0
    while not await stage.dead_letters():
        task = asyncio.create_task(stage.runtime().run(asyncio.Event()))

        async def over(task: "asyncio.Task[None]" = task) -> None:
            assert task.done() or await stage.dead_letters()

        await eventually(over)
        if task.done():
            deaths += 1
            with pytest.raises(BaseExceptionGroup):
                await task
            await stage.log.close()
        else:
            await stage.offset_is(10)
            await crash(task, stage.log)
        assert deaths < 10
    assert deaths == 4
    [letter] = await stage.dead_letters()
    assert (letter["reason"], letter["source_offset"], bytes(letter["body"])) == ("kills_its_reader", 3, first("k3"))
    async with running(stage.runtime(), stage.relay()):
        await stage.all_sent([key for key in KEYS if key != "k3"])


async def test_a_record_that_kills_its_reader_in_a_later_turn_is_laid_to_rest(stage: Stage) -> None:
    """Turns of two, and the fourth kills: each start moves the offset or is counted, so it ends all the same."""
    stage.change(turn_records=2)
    stage.processor.impossible["k7"] = Killed()  # type: ignore[assignment]
    await stage.publish(*map(first, KEYS))
    deaths = 0
    while not await stage.dead_letters():
        task = asyncio.create_task(stage.runtime().run(asyncio.Event()))

        async def over(task: "asyncio.Task[None]" = task) -> None:
            assert task.done() or await stage.dead_letters()

        await eventually(over)
        deaths += task.done()
        with suppress(BaseExceptionGroup):
            await crash(task, stage.log)
        await stage.log.close()
        assert deaths < 15
    [letter] = await stage.dead_letters()
    assert (letter["reason"], letter["source_offset"]) == ("kills_its_reader", 7)


# ---- the provider is away


async def test_the_breaker_opens_when_many_fail_alike_and_closes_by_itself(stage: Stage) -> None:
    """Those that failed have used one attempt each, the rest none; when it is back all are sent."""
    stage.change(breaker=BreakerPolicy(threshold=4, probe_seconds=0.05, probe_max_seconds=0.1), recovery=LONG)
    keys = [f"k{n}" for n in range(30)]
    stage.processor.outage = Retry("connection refused", fault="connect")
    await stage.publish(*map(first, keys))
    runtime = stage.runtime()
    async with running(runtime, stage.relay()):

        def is_open() -> None:
            assert runtime.breaker.is_open
            assert not stage.processor.running

        await eventually(is_open)
        tried = {claim.key for claim in stage.processor.claims}
        assert 4 <= len(tried) <= 4 + stage.limits.slots
        stage.processor.outage = None
        for key in keys:
            if key not in tried:
                assert (await stage.status(key, "sent"))["attempts"] == 1
        await stage.query(f"UPDATE email_dispatches SET next_attempt_at = {from_now(stage.engine, -1)}")
        await stage.all_sent(keys)
    assert await stage.count("attempts > 2") == 0
    assert set(stage.processor.sent.values()) == {1}


async def test_a_few_rows_use_up_their_attempts_when_the_provider_is_away(stage: Stage) -> None:
    """Fewer than the threshold: the ordinary attempts, then failed; the breaker stays closed."""
    stage.processor.outage = Retry("connection refused", fault="connect")
    await stage.publish(first("a"), first("b"))
    runtime = stage.runtime()
    async with running(runtime, stage.relay()):
        for key in ("a", "b"):
            assert (await stage.status(key, "failed"))["attempts"] == 3
        assert not runtime.breaker.is_open


async def test_no_more_acts_begin_than_the_rate_allows(stage: Stage) -> None:
    """At most rate x elapsed + 1 at any moment."""
    stage.change(rate_per_second=25.0, slots=16)
    loop, began = asyncio.get_running_loop(), []
    act = stage.processor.act

    async def noting(claim: object, gate: object) -> object:
        began.append(loop.time())
        return await act(claim, gate)  # type: ignore[arg-type]

    stage.processor.act = noting  # type: ignore[assignment, method-assign]
    await stage.publish(*map(first, KEYS))
    async with running(stage.runtime()):
        await stage.all_sent(KEYS)
    # a claim may be granted a little before its act begins
    slack = 0.5
    assert all(n <= 25 * (at - began[0] + slack) + 1 for n, at in enumerate(began, 1))
    assert began[-1] - began[0] >= (len(KEYS) - 1) / 25 - slack


# ---- bounds


async def test_memory_is_bounded_when_one_act_is_stuck_before_a_huge_backlog(stage: Stage) -> None:
    """The offset stays before the stuck one; the window, the candidates and the buffer end somewhere."""
    stage.change(turn_records=10, act_timeout=60.0, lease=120.0)
    may_go = stage.processor.block("k0")
    keys = [f"k{n}" for n in range(400)]
    await stage.publish(*map(first, keys))
    runtime = stage.runtime()
    async with running(runtime):
        [assignment] = await _assignments(runtime)

        async def stands_still() -> None:
            assert len(assignment.window.entries) >= 100
            assert await stage.count("status = 'sent'") == len(assignment.window.entries) - 1

        await eventually(stands_still)
        assert len(assignment.window.entries) < 100 + 2 * 10
        assert (await stage.position())["next_offset"] == 0
        may_go.set()
        await stage.all_sent(keys)
        await stage.offset_is(400)


async def _assignments(runtime: Runtime) -> list[Assignment]:
    def there() -> list[Assignment]:
        assert runtime._assignments
        return list(runtime._assignments)

    return await eventually(there)


# ---- the relay and the lag


async def test_the_relay_repeats_nothing_into_a_partition_that_is_behind(stage: Stage) -> None:
    """H9: messages under way for long, because the backlog is long: copies would make it longer."""
    stage.change(repeat_lag_limit=10)
    stage.processor.all_may_go.clear()
    keys = [f"k{n}" for n in range(30)]
    await stage.publish(*map(first, keys))
    task = asyncio.create_task(stage.runtime().run(asyncio.Event()))

    async def all_are_planned() -> None:
        assert await stage.count("true") == 30

    await eventually(all_are_planned)
    await crash(task, stage.log)
    stage.processor.all_may_go.set()
    await stage.query(f"UPDATE email_dispatches SET queued_until = {from_now(stage.engine, -1)}, lease_until = NULL")
    [partition] = await stage.log.partitions(STREAM)
    async with running(stage.relay()):
        [other] = await stage.query(
            """INSERT INTO email_dispatches ("to", subject, content, mailable_type, status, idempotency_key)
            VALUES ('x@example.com', 's', 'c', 'm', 'pending', 'x') RETURNING id"""
        )

        async def first_publication() -> None:
            assert (await stage.log.bounds(partition)).next == 31

        await eventually(first_publication)
        await stage.query("UPDATE email_dispatches SET queued_until = NULL WHERE id = :id", id=other["id"])

        async def one_more_turn() -> None:
            assert (await stage.log.bounds(partition)).next == 32

        await eventually(one_more_turn)
    async with running(stage.runtime(), stage.relay()):
        await stage.all_sent([*keys, "x"])
    assert set(stage.processor.sent.values()) == {1}


async def test_a_reservation_whose_message_was_lost_is_repeated(stage: Stage) -> None:
    """The relay died between reservation and publication: after the visibility the row comes again."""
    await stage.query(
        f"""INSERT INTO email_dispatches ("to", subject, content, mailable_type, status, idempotency_key, queued_until)
        VALUES ('x@example.com', 's', 'c', 'm', 'pending', 'x', {from_now(stage.engine, 0.5)})"""
    )
    async with running(stage.runtime(), stage.relay()):
        row = await stage.status("x", "sent")
    assert (row["attempts"], row["doubts"]) == (1, 0)
