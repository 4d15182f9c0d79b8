"""`afluente status`, `pause` and `resume`, from a process of their own, on both sites."""

import asyncio
import json
from typing import Any

from processors._demo.sink import Sink
from streams.exit_codes import ExitCode
from streams.testing import eventually
from tests.support.command import afluente
from tests.support.databases import from_now
from tests.support.job import Job, Looks, address, people, person, seconds
from tests.support.sites import Site


async def status(looks: Looks, **changes: str) -> dict[str, Any]:
    """What `afluente status --json` writes."""
    done = await afluente(looks.environment | changes, "status", "--json")
    assert done.code == ExitCode.OK, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def positions(shown: dict[str, Any], processor: str) -> list[dict[str, Any]]:
    """The positions of one processor."""
    return [p for p in shown["processors"] if p["processor"] == processor]


async def test_each_partition_is_shown_at_its_end_when_all_is_read(site: Site, sink: Sink) -> None:
    """Asked beside the running processors, whose file is claimed on the embedded log."""
    async with Job(site, sink) as job:
        await job.publish(people(20))
        await job.settled(20)
        shown = await status(job)

    [splitter], mailers = positions(shown, "splitter"), positions(shown, "mailer")
    assert [p["partition"] for p in mailers] == [0, 1, 2]
    assert all((p["lag_records"], p["lag_seconds"]) == (0, 0) for p in (splitter, *mailers))
    assert all(p["offset"] == p["end"] for p in (splitter, *mailers))
    assert splitter["end"] == 1
    assert sum(p["end"] for p in mailers) == 20


async def test_numbers_of_a_batch_are_those_of_its_rows(site: Site, sink: Sink) -> None:
    """Sent, failed, waiting for a retry, rejected, repeated: each registration is counted once."""
    sink.script("rcpt", reply="550 no such mailbox", recipient=address(2))
    async with Job(site, sink, BACKOFF_SECONDS="0.1") as job:
        batch = await job.publish([*people(4), person(1), person(5, agent_email=None)])
        await job.settled(4)
        never = from_now(job.engine, 3600)
        await job.sql(
            f"""UPDATE email_dispatches SET status = 'pending', next_attempt_at = {never}, sent_at = NULL
            WHERE "to" = :to""",
            to=address(3),
        )
        shown = await status(job)

    [found] = shown["batches"]
    counts = {name: found[name] for name in ("total", "sent", "waiting", "failed", "rejected", "duplicate")}
    assert counts == {"total": 6, "sent": 2, "waiting": 1, "failed": 1, "rejected": 1, "duplicate": 1}
    assert (found["batch_id"], found["times_received"]) == (batch, 1)
    assert shown["rows"] == {"failed": 1, "pending": 1, "sent": 2}
    assert shown["dead_letters"] == {"attempts_used_up": 1, "invalid_registration": 1}


async def test_a_dead_letter_is_not_counted_when_somebody_has_seen_to_it(site: Site, sink: Sink) -> None:
    """One whose row was set back by plain SQL, and one whose record was redriven: neither needs anybody."""
    sink.script("rcpt", reply="550 no such mailbox", recipient=address(2))
    async with Job(site, sink, BACKOFF_SECONDS="0.1") as job:
        await job.publish([person(1), person(2), person(5, agent_email=None)])
        await job.settled(2)
        assert (await status(job))["dead_letters"] == {"attempts_used_up": 1, "invalid_registration": 1}
        never = from_now(job.engine, 3600)
        await job.sql(
            f"UPDATE email_dispatches SET status = 'pending', next_attempt_at = {never} WHERE sent_at IS NULL"
        )
        assert (await status(job))["dead_letters"] == {"invalid_registration": 1}
        await job.sql(f"UPDATE dead_letters SET redriven_at = {never} WHERE row_id IS NULL")
        assert (await status(job))["dead_letters"] == {}


async def test_what_was_received_waits_when_it_has_no_row_yet(site: Site, sink: Sink) -> None:
    """A batch is whole from the moment it was split: what the mailer has not seen is waiting, not missing."""
    async with Job(site, sink, processors=["splitter"]) as job:
        batch = await job.publish(people(7))
        await eventually(lambda: job.received(batch, 1))
        shown = await status(job)

    [found] = shown["batches"]
    assert (found["total"], found["waiting"], found["sent"]) == (7, 7, 0)


async def test_lag_is_shown_in_records_and_age_when_nobody_reads(site: Site, sink: Sink) -> None:
    """The age is that of the oldest record that is not read, told by the log itself."""
    async with Looks(site, sink) as looks:
        await looks.publish(people(1))
        await asyncio.sleep(1.1)  # an age needs time to pass
        await looks.publish(people(2))
        shown = await status(looks)

    [splitter], mailers = positions(shown, "splitter"), positions(shown, "mailer")
    assert (splitter["offset"], splitter["end"], splitter["lag_records"]) == (None, 2, 2)
    assert splitter["lag_seconds"] >= 1.0
    assert all((m["lag_records"], m["lag_seconds"]) == (0, 0) for m in mailers)


async def test_paused_processor_takes_nothing_until_it_is_resumed(site: Site, sink: Sink) -> None:
    """Noticed by the running one, with the reason for whoever asks."""
    async with Job(site, sink) as job:
        await job.publish(people(3))
        await job.settled(3)
        paused = await afluente(job.environment, "pause", "mailer", "--reason", "the provider asked for it")
        assert paused.code == ExitCode.OK, paused.err
        since = await job.now()
        await eventually(lambda: looked(job, since))

        batch = await job.publish([person(9)])
        await eventually(lambda: job.received(batch, 1))
        mailers = positions(await status(job), "mailer")
        assert {m["paused_reason"] for m in mailers} == {"the provider asked for it"}
        assert sum(m["lag_records"] for m in mailers) == 1
        assert address(9) not in job.mails()

        resumed = await afluente(job.environment, "resume", "mailer")
        assert resumed.code == ExitCode.OK, resumed.err
        await job.settled(4)
        assert not any(p["paused"] or p["paused_reason"] for p in (await status(job))["processors"])

    assert job.mails()[address(9)] == 1


async def looked(job: Job, since: float) -> None:
    """An AssertionError until the mailer has looked at each of its positions once more, from beginning to end."""
    rows = await job.sql("SELECT seen_at FROM processor_offsets WHERE processor = 'mailer'")
    looks = [seconds(row["seen_at"]) for row in rows if row["seen_at"]]
    assert len(looks) == 3
    assert min(looks) > since + 2 * job.settings.idle_look_seconds


async def test_in_doubt_and_held_are_counted(site: Site, sink: Sink) -> None:
    """Whoever may have got a mail twice, and whose outcome nobody knows at the moment."""
    async with Job(site, sink) as job:
        await job.publish(people(4))
        await job.settled(4)
        await job.sql('UPDATE email_dispatches SET doubts = 1 WHERE "to" = :to', to=address(1))
        await job.sql(
            "UPDATE email_dispatches SET status = 'failed', held = :yes WHERE \"to\" = :to", yes=True, to=address(2)
        )
        shown = await status(job)

    assert (shown["in_doubt"], shown["held"]) == (1, 1)
    assert shown["batches"][0]["held"] == 1


async def test_rows_are_shown_when_the_log_does_not_answer(
    services_site: Site, sink: Sink, unused_tcp_port: int
) -> None:
    """At night with the broker down the batches still matter; the ends are those last seen."""
    async with Job(services_site, sink) as job:
        await job.publish(people(3))
        await job.settled(3)
        await eventually(lambda: ends_seen(job))
        away = f"rabbitmq-stream://u:secret@127.0.0.1:{unused_tcp_port}/"
        shown = await status(job, LOG_URL=away)
        table = await afluente(job.environment | {"LOG_URL": away}, "status")

    assert shown["batches"][0]["sent"] == 3
    assert str(unused_tcp_port) in shown["log_away"]
    assert "secret" not in shown["log_away"]
    assert sum(p["end"] for p in positions(shown, "mailer")) == 3
    assert "the log does not answer" in table.err
    assert "complete" in table.out


async def ends_seen(job: Job) -> None:
    """An AssertionError until the mailer has written down what the ends are."""
    [row] = await job.sql("SELECT sum(end_offset) AS n FROM processor_offsets WHERE processor = 'mailer'")
    assert row["n"] == 3
