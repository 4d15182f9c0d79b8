"""The import job from a published list to the mail server, on both sites: each person's e-mail comes out once."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sentry_sdk

from models.registration import parse_registration
from processors._demo.sink import Sink
from processors.mailer.processor import Mailer
from streams import telemetry
from streams.testing import eventually
from tests.support.job import Job, Looks, address, people, person, seconds
from tests.support.sites import Site

LONG = "60,300,900"
"""A back-off that no test waits for."""


@pytest.mark.parametrize(("size", "failing"), [(5, 3), (3, 2)])
async def test_only_the_failed_mail_is_tried_again_when_one_send_of_a_batch_fails(
    site: Site, sink: Sink, size: int, failing: int
) -> None:
    """What the old consumer got wrong: those before the failure got their mail again, those behind it none."""
    refusal = sink.script("dot", reply="451 4.3.0 try again later", recipient=address(failing), times=1)
    async with Job(site, sink) as job:
        batch = await job.publish(people(size))
        await job.settled(size)
        assert job.mails() == {address(n): 1 for n in range(1, size + 1)}
        assert await job.attempts() == {address(n): 1 + (n == failing) for n in range(1, size + 1)}
        assert refusal.seen.total() == 2
        assert (await job.batch(batch)).sent == size


# ---- redelivery


async def test_nobody_is_mailed_again_when_a_batch_is_redelivered_after_all_are_sent(site: Site, sink: Sink) -> None:
    """The same list once more: no mail, no new row, no change of a row; the batch says how often it came."""
    async with Job(site, sink) as job:
        batch = await job.publish(people(5))
        await job.settled(5)
        rows = await job.rows()
        await job.publish(people(5))
        await eventually(lambda: job.received(batch, times=2))
        await job.caught_up()
        assert await job.rows() == rows
        assert set(job.mails().values()) == {1}
        seen = await job.batch(batch)
        assert (seen.total, seen.sent, seen.duplicate, seen.waiting) == (5, 5, 0, 0)


async def test_nobody_is_mailed_early_when_a_batch_is_redelivered_while_one_waits_for_its_retry(
    site: Site, sink: Sink
) -> None:
    """The row says when; a message is only a hint. When its time comes it is sent, once."""
    refusal = sink.script("rcpt", reply="451 4.7.1 later", recipient=address(2), times=1)
    async with Job(site, sink, BACKOFF_SECONDS=LONG) as job:
        batch = await job.publish(people(3))
        await eventually(lambda: waits_for_retry(job, 2))
        await job.publish(people(3))
        await eventually(lambda: job.received(batch, times=2))
        await job.caught_up()
        waiting = await job.row(2)
        assert (waiting["status"], waiting["attempts"], refusal.seen.total()) == ("pending", 1, 1)
        await job.sql("UPDATE email_dispatches SET next_attempt_at = NULL WHERE id = :id", id=waiting["id"])
        await job.settled(3)
        assert job.mails() == {address(n): 1 for n in (1, 2, 3)}


async def waits_for_retry(job: Job, number: int) -> dict[str, Any]:
    """The person's first send has failed, and the row waits."""
    row = await job.row(number)
    assert (row["status"], row["attempts"], row["lease_until"]) == ("pending", 1, None)
    assert row["next_attempt_at"] is not None
    return row


# ---- failing for good


@pytest.fixture
def reports() -> Iterator[list[dict[str, Any]]]:
    """What goes to Sentry, as it leaves the process."""
    found: list[dict[str, Any]] = []

    class Kept(sentry_sdk.Transport):
        def capture_envelope(self, envelope: Any) -> None:
            found.append(json.loads(envelope.items[0].get_bytes()))

    telemetry.init_sentry("http://key@127.0.0.1:1/1", "test", "test")
    client = sentry_sdk.get_client()
    before, client.transport = client.transport, Kept()
    if before is not None:
        before.kill()
    yield found
    sentry_sdk.get_client().close()
    sentry_sdk.get_global_scope().set_client(None)


async def test_mails_fail_after_three_attempts_and_are_reported_once_when_the_mail_server_is_away(
    site: Site, sink: Sink, reports: list[dict[str, Any]]
) -> None:
    """Each attempt is counted when it begins and waits its back-off; no row was ever `sent`; one dead letter each."""
    sink.script("connect", do="close")
    async with Job(site, sink) as job:
        began = await job.now()
        await job.publish(people(3))
        first = await eventually(lambda: waits_for_retry(job, 1))
        assert began + 0.3 <= seconds(first["next_attempt_at"]) <= await job.now() + 0.3 * 1.2
        await job.settled(3)
        rows = await job.rows()
        assert [(r["status"], r["attempts"], r["claim_no"], r["sent_at"]) for r in rows] == [("failed", 3, 3, None)] * 3
        assert all(r["error_message"].startswith("connect: ") for r in rows)
        assert sink.connections == 3 * 3
        history = [json.loads(r["new_values"]) for r in await job.sql("SELECT * FROM audits ORDER BY id")]
        assert [values["status"] for values in history] == ["pending"] * 3 + ["failed"] * 3
        letters = await job.dead_letters()
        assert {(d["row_id"], d["claim_no"], d["reason"], d["attempts"]) for d in letters} == {
            (r["id"], 3, "attempts_used_up", 3) for r in rows
        }
        assert sorted(report["tags"]["row_id"] for report in reports) == sorted(str(r["id"]) for r in rows)
        assert "@" not in json.dumps(reports) + "".join(d["error"] + d["message_key"] for d in letters)


async def test_attempts_are_true_at_all_times_when_sends_fail(site: Site, sink: Sink) -> None:
    """Whoever looks while an attempt is under way sees it counted: as many attempts as the mail server has seen."""
    seen: list[tuple[int, int]] = []
    sink.script("rcpt", reply="451 4.7.1 later", delay=0.2)
    async with Job(site, sink) as job:
        await job.publish([person(1)])

        async def is_failed() -> None:
            begun = sum(verb == "RCPT" for verb, _ in sink.commands)
            row = await job.row(1)
            seen.append((begun, row["attempts"]))
            assert row["status"] == "failed"

        await eventually(is_failed)
        assert all(begun <= attempts for begun, attempts in seen)
        assert {attempts for _, attempts in seen} >= {1, 2, 3}
        assert (await job.row(1))["attempts"] == sum(verb == "RCPT" for verb, _ in sink.commands) == 3


async def test_failed_mail_is_sent_once_more_when_a_person_sets_its_row_to_pending(site: Site, sink: Sink) -> None:
    """The plain UPDATE is a complete retry; on a sent row the table refuses it."""
    sink.script("dot", reply="554 5.7.1 no", recipient=address(2), times=3)
    async with Job(site, sink) as job:
        batch = await job.publish(people(3))
        await job.settled(3)
        failed = await job.row(2)
        assert (failed["status"], failed["attempts"]) == ("failed", 3)
        again = "UPDATE email_dispatches SET status='pending', attempts=0 WHERE id=:id"
        await job.sql(again, id=failed["id"])
        await job.settled(3)
        row = await job.row(2)
        assert (row["status"], row["attempts"], row["claim_no"], row["error_message"]) == ("sent", 1, 4, None)
        assert job.mails() == {address(n): 1 for n in (1, 2, 3)}
        assert (await job.batch(batch)).sent == 3
        with pytest.raises(Exception, match="pending_never_sent_nor_held"):
            await job.sql(again, id=row["id"])


async def test_numbers_of_a_batch_add_up_when_some_fail_and_one_succeeds_later(site: Site, sink: Sink) -> None:
    """10 = 7 + 3, nothing waits; after one retry 10 = 8 + 2. Counted from rows, so they cannot drift (O-48)."""
    for number in (3, 6, 9):
        sink.script("rcpt", reply="550 5.1.1 no such user", recipient=address(number))
    async with Job(site, sink, BACKOFF_SECONDS="0.1") as job:
        batch = await job.publish(people(10))
        await job.settled(10)
        seen = await job.batch(batch)
        assert (seen.total, seen.sent, seen.failed, seen.waiting, seen.complete) == (10, 7, 3, 0, True)
        sink.forget()
        row = await job.row(6)
        await job.sql("UPDATE email_dispatches SET status='pending', attempts=0 WHERE id=:id", id=row["id"])
        await job.settled(10)
        seen = await job.batch(batch)
        assert (seen.total, seen.sent, seen.failed, seen.waiting) == (10, 8, 2, 0)


async def test_message_id_stays_the_same_when_a_mail_is_sent_again(site: Site, sink: Sink) -> None:
    """The reply to the first attempt is lost: both copies carry the id that the row names, and no name (O-12)."""
    sink.script("dot", do="reset", times=1)
    async with Job(site, sink) as job:
        await job.publish([person(1)])
        await job.settled(1)
        row = await job.row(1)
        assert [mail.message_id for mail in sink.mails] == [row["message_id"]] * 2
        assert row["message_id"] == f"<{row['idempotency_key'][:32]}@example.org>"
        assert (row["status"], row["attempts"], row["doubts"]) == ("sent", 2, 1)


async def test_retries_are_spread_and_never_early_when_many_fail_at_once(site: Site, sink: Sink) -> None:
    """Else all would come back in the same instant, and fail again (O-52)."""
    sink.script("rcpt", reply="451 4.3.2 overloaded")
    async with Job(site, sink, BACKOFF_SECONDS=LONG, BACKOFF_JITTER=0.2) as job:
        began = await job.now()
        await job.publish(people(100))
        await job.caught_up()
        due = [seconds(row["next_attempt_at"]) for row in await job.rows()]
        assert len(due) == 100
        assert began + 60 <= min(due)
        assert max(due) <= await job.now() + 72
        assert max(due) - min(due) > 6


# ---- several mailers


async def test_each_is_mailed_once_when_mailers_read_the_same_messages_at_the_same_time(site: Site, sink: Sink) -> None:
    """Every partition holds all 300: three mailers insert and claim the same rows, and one of them wins each (O-27)."""
    async with Job(site, sink, processors=["splitter"]) as job:
        await job.publish(people(300))
        await eventually(lambda: are_stored(job, 300))
        messages = [message.encode() for message in await job.recipients()]
    async with Looks(site, sink) as looks:
        for partition in range(looks.settings.recipients_partitions):
            await looks.put(*messages, stream=looks.settings.recipients_stream, partition=partition)
    async with Job(site, sink, mailers=3) as job:
        await job.settled(300)
        assert job.mails() == {address(n): 1 for n in range(1, 301)}
        assert set((await job.attempts()).values()) == {1}
        assert await job.count("doubts > 0") == 0


async def are_stored(job: Job, count: int) -> None:
    """So many messages are in the stream of recipients."""
    job.check()
    assert await job.stored() == count


# ---- a fault of our own


@pytest.mark.parametrize("step", ["plan", "act"])
async def test_the_others_are_mailed_when_one_message_meets_a_fault_of_ours(
    site: Site, sink: Sink, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """An exception that nobody foresaw, for the 3rd of 10 messages of a chunk: it is tried again or laid to rest by
    itself, those behind it are handled, and the offset passes all (O-19)."""
    third = parse_registration(person(3)).key
    real: Callable[..., Any] = getattr(Mailer, step)
    failed: list[str] = []

    def spoilt(self: Mailer, subject: Any, *more: Any) -> Any:
        key = subject.id if step == "plan" else subject.key
        if key == third and not failed:
            failed.append(key)
            raise ZeroDivisionError
        return real(self, subject, *more)

    monkeypatch.setattr(Mailer, step, spoilt)
    async with Job(site, sink, RECIPIENTS_PARTITIONS=1) as job:
        await job.publish(people(10))
        await job.settled(10 if step == "act" else 9)
        assert failed == [third]
        letters = [(d["source_offset"], d["reason"]) for d in await job.dead_letters()]
        if step == "plan":
            assert job.mails() == {address(n): 1 for n in range(1, 11) if n != 3}
            assert letters == [(2, "unexpected_error")]
        else:
            assert job.mails() == {address(n): 1 for n in range(1, 11)}
            assert (await job.row(3))["attempts"] == 2
            assert letters == []
