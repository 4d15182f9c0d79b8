"""Dead letters tried again, on both sites: each once, at its pace, and nothing that must not be touched."""

import asyncio
import json
import signal
from typing import Any

import pytest

from models.dispatches import IMPORT_MAILABLE_TYPE
from models.registration import parse_registration
from processors._compose import PROCESSORS
from processors._demo.sink import Sink
from processors._redrive import TABLES, Outlook, Redrive, Redriven, Stream, Wish, forecast
from streams.dead_letters import DeadLetter, lay
from streams.exit_codes import ExitCode
from streams.logs import open_log
from streams.redrive import SENTENCES, Filter, Letters
from streams.sql import Database
from streams.testing import eventually
from tests.support.command import afluente, started
from tests.support.job import Job, Looks, address, bare, person, seconds
from tests.support.sites import Site

NEW_KEYS = {name: entry.new_keys for name, entry in PROCESSORS.items() if entry.new_keys is not None}


async def redrive(looks: Looks, wish: Wish, stop: asyncio.Event | None = None, stop_at: int = 0) -> Redriven:
    """Redrive as the command does; `stop_at` letters were done when somebody stops it."""
    stop, told = stop or asyncio.Event(), []

    def tell(letter_id: int, reason: str | None) -> None:
        told.append(letter_id)
        if len(told) == stop_at:
            stop.set()

    stream = Stream(open_log(looks.site.log_url, label="redrive"))
    try:
        done = await Redrive(looks.engine, stream, wish, tell).run(stop)
    finally:
        await stream.close()
    assert len(told) == done.done + done.refused.total()
    return done


async def outlook(looks: Looks, wish: Wish) -> Outlook:
    """What a dry run says."""
    return await forecast(looks.engine, wish, NEW_KEYS)


def every(**more: Any) -> Wish:
    """All open ones."""
    return Wish(Filter(), "ana", **more)


async def failed_rows(looks: Looks, count: int, **changes: str) -> list[int]:
    """Rows of `person(1)` to `person(count)` that have used up their attempts, each with its dead letter; their ids."""
    values = {"status": "'failed'", "claim_no": "3", "attempts": "3", "error_message": "'451 later'"} | changes
    for number in range(1, count + 1):
        registration = parse_registration(person(number))
        await looks.sql(
            f"""INSERT INTO email_dispatches
            ("to", subject, content, mailable_type, meta, idempotency_key, {", ".join(values)})
            VALUES (:to, 's', 'c', :kind, :meta, :key, {", ".join(values.values())})""",
            to=address(number),
            kind=IMPORT_MAILABLE_TYPE,
            meta=json.dumps(registration._asdict()),
            key=registration.key,
        )
    ids = [row["id"] for row in await looks.sql("SELECT id FROM email_dispatches ORDER BY id")]
    await lay_all(
        looks,
        *(
            DeadLetter("mailer", "recipients", 0, "attempts_used_up", "451 later", table_name="email_dispatches",
                       row_id=row_id, claim_no=3, attempts=3)
            for row_id in ids
        ),
    )  # fmt: skip
    return ids


async def lay_all(looks: Looks, *letters: DeadLetter) -> None:
    """Lay them as the engine does."""
    async with Database(looks.engine, 1.0).open() as sql:
        await lay(sql, letters)


async def listed(looks: Looks, **wanted: Any) -> list[dict[str, Any]]:
    """What `dead-letters list` shows."""
    async with Database(looks.engine, 1.0).open() as sql:
        return [dict(row) for row in await Letters(sql, TABLES).newest(Filter(**wanted), 50)]


# ---- the pace


async def test_never_more_than_the_rate_and_each_once_when_stopped_in_the_middle(site: Site, sink: Sink) -> None:
    """At no moment more than rate x elapsed + 1; the same command goes on with what is left."""
    rate, count = 100.0, 300
    async with Job(site, sink) as job:
        await failed_rows(job, count)
        for stop_at in (120, 0):
            began = await job.now()
            done = await redrive(job, every(per_second=rate), stop_at=stop_at)
            assert (done.done, done.left) == ((120, 180) if stop_at else (180, 0))
            at = [seconds(row["redriven_at"]) - began for row in await job.dead_letters() if row["redriven_at"]]
            times = sorted(t for t in at if t >= 0)
            assert len(times) >= done.done - 1
            assert all(n <= rate * (t + 0.002) + 1 for n, t in enumerate(times, 1))  # SQLite's clock has milliseconds
        await job.settled(count)
        assert job.mails() == {address(n): 1 for n in range(1, count + 1)}
        assert {row["redriven_by"] for row in await job.dead_letters()} == {"ana"}


async def test_command_stops_on_ctrl_c_and_the_same_command_goes_on(embedded_site: Site, sink: Sink) -> None:
    """It says how far it came."""
    command = ["dead-letters", "redrive", "--all", "--by", "ana"]
    async with Looks(embedded_site, sink) as looks:
        await failed_rows(looks, 40)
        async with started(looks.environment, *command, "--rate", "10") as process:

            async def has_begun() -> None:
                assert await looks.count("status = 'pending'") >= 3

            await eventually(has_begun, 60)
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
        assert process.returncode == ExitCode.FAILED
        done = await looks.count("status = 'pending'")
        assert f"{done} redriven" in out.decode()
        assert f"stopped, {40 - done} left: the same command goes on" in err.decode()
        again = await afluente(looks.environment, *command)
        assert (again.code, again.out) == (ExitCode.OK, f"{40 - done} redriven\n")


# ---- what is left alone

NOT_REDRIVEN = {
    "sent": {"status": "'sent'", "sent_at": "'2026-12-01 00:00:00+00:00'"},
    "held": {"held": "true"},
    "in flight": {"status": "'pending'", "lease_until": "'2099-01-01 00:00:00+00:00'"},
    "waiting": {"status": "'pending'", "next_attempt_at": "'2099-01-01 00:00:00+00:00'"},
    "failed again": {"claim_no": "6"},
}


@pytest.mark.parametrize("state", [*NOT_REDRIVEN, "gone"])
async def test_nothing_is_done_and_it_is_said_why_when_a_row_is(state: str, site: Site, sink: Sink) -> None:
    """Named by its id, or met on the way: the row itself is asked in the same transaction."""
    async with Looks(site, sink) as looks:
        await failed_rows(looks, 1, **{name: v.replace(":", r"\:") for name, v in NOT_REDRIVEN.get(state, {}).items()})
        if state == "gone":
            await looks.sql("DELETE FROM email_dispatches")
        rows, audits = await looks.rows(), await looks.sql("SELECT * FROM audits ORDER BY id")
        [letter] = await looks.dead_letters()
        wish = Wish(Filter(ids=[letter["id"]], open_only=False), "ana")
        assert (await outlook(looks, wish)).mails == 0
        done = await redrive(looks, wish)
        assert (done.done, dict(done.refused)) == (0, {SENTENCES[state]: 1})  # type: ignore[index]
        assert await looks.rows() == rows
        assert await looks.sql("SELECT * FROM audits ORDER BY id") == audits
        assert (await looks.dead_letters())[0]["redriven_at"] is None
        assert (await redrive(looks, every())).done == 0


async def test_row_is_asked_again_when_it_changes_between_the_look_and_the_redrive(site: Site, sink: Sink) -> None:
    """A person was quicker: 2 of 3 are redriven, the third is none of ours any more."""
    async with Looks(site, sink) as looks:
        ids = await failed_rows(looks, 3)
        stream = Stream(open_log(site.log_url, label="redrive"))
        changed: list[int] = []

        def tell(letter_id: int, reason: str | None) -> None:
            changed.append(letter_id)

        run = Redrive(looks.engine, stream, every(per_second=4.0), tell)
        redriving = asyncio.create_task(run.run(asyncio.Event()))
        await eventually(lambda: _is_not_empty(changed))
        await looks.sql("UPDATE email_dispatches SET status = 'pending', attempts = 0 WHERE id = :id", id=ids[2])
        done = await redriving
        await stream.close()
        assert (done.done, dict(done.refused)) == (2, {SENTENCES["waiting"]: 1})


def _is_not_empty(found: list[int]) -> None:
    assert found


async def test_held_mail_is_redriven_only_when_that_is_said(site: Site, sink: Sink) -> None:
    """Nobody who may have got it gets it again by a bulk redrive."""
    async with Job(site, sink) as job:
        await failed_rows(job, 2, held="true")
        done = await redrive(job, every())
        assert (done.done, dict(done.refused)) == (0, {SENTENCES["held"]: 2})
        assert (await outlook(job, every(include_unknown=True))).mails == 2
        assert (await redrive(job, every(include_unknown=True))).done == 2
        await job.settled(2)
        assert job.mails() == {address(1): 1, address(2): 1}


async def test_audit_says_who_redrove(site: Site, sink: Sink) -> None:
    """The trigger writes what changed, the command for whom."""
    async with Looks(site, sink) as looks:
        [row_id] = await failed_rows(looks, 1)
        done = await afluente(looks.environment, "dead-letters", "redrive", "--all", "--by", "João")
        assert done.code == ExitCode.OK, done.err
        last = (await looks.sql("SELECT * FROM audits ORDER BY id"))[-1]
        assert (last["auditable_id"], last["tags"]) == (row_id, "afluente redrive by João")
        assert json.loads(last["new_values"])["status"] == "pending"
        assert (await looks.dead_letters())[0]["redriven_by"] == "João"


async def test_event_is_sent_again_when_its_dead_letter_is_redriven(site: Site, sink: Sink) -> None:
    """Rows of the outbox live by the same protocol; its audit says who as well."""
    async with Looks(site, sink) as looks:
        for status in ("failed", "sent"):
            await looks.sql(
                f"""INSERT INTO outbox_events (event_name, payload, status, claim_no, attempts)
                VALUES ('e', '{{"a"\\: 1}}', '{status}', 3, 3)"""
            )
        rows = await looks.sql("SELECT id FROM outbox_events ORDER BY id")
        await lay_all(
            looks,
            *(
                DeadLetter("sync", "outbox", 0, "attempts_used_up", "503", table_name="outbox_events",
                           row_id=row["id"], claim_no=3)
                for row in rows
            ),
        )  # fmt: skip
        seen = await outlook(looks, every())
        assert (seen.letters, seen.mails, seen.events) == (1, 0, 1)
        assert (await redrive(looks, every())).done == 1
        after = await looks.sql("SELECT status, attempts FROM outbox_events ORDER BY id")
        assert [tuple(row.values()) for row in after] == [("pending", 0), ("sent", 3)]
        last = (await looks.sql("SELECT * FROM audits ORDER BY id"))[-1]
        assert (last["auditable_id"], last["tags"]) == (rows[0]["id"], "afluente redrive by ana")


# ---- fails again


async def test_open_letters_show_a_row_once_when_it_fails_again_after_a_retry(site: Site, sink: Sink) -> None:
    """One row, one open letter; and none once it was sent (O-43)."""
    sink.script("rcpt", reply="550 5.1.1 no such user", recipient=address(1), times=6)
    async with Job(site, sink, BACKOFF_SECONDS="0.1") as job:
        batch = await job.publish([person(1)])
        await job.settled(1)
        await job.sql("UPDATE email_dispatches SET status = 'pending', attempts = 0")
        await job.settled(1)
        first, second = await job.dead_letters()
        assert [letter["id"] for letter in await listed(job)] == [second["id"]]
        assert [letter["id"] for letter in await listed(job, batch=batch[:12])] == [second["id"]]
        shown = {letter["id"]: letter["state"] for letter in await listed(job, open_only=False)}
        assert shown == {first["id"]: "failed again", second["id"]: "open"}
        assert (await redrive(job, every())).done == 1
        await job.settled(1)
        assert await listed(job) == []
        assert job.mails() == {address(1): 1}
        assert len(await job.rows()) == 1


# ---- records that never became a row


async def test_records_are_published_again_and_name_their_first_letter_when_they_die_again(
    site: Site, sink: Sink
) -> None:
    """Undecodable, a refused list, an invalid registration: three new letters, and the batch is counted as before."""
    async with Job(site, sink) as job:
        batch = await job.publish([person(1), person(2, agent_email="nobody"), person(3)])
        await job.put(b"no message", bare(b"{}"))
        await job.settled(2)
        await eventually(lambda: letters_are(job, 3))
        before, counted = await job.dead_letters(), await job.sql("SELECT * FROM import_batches")
        seen = await outlook(job, every())
        assert (seen.letters, seen.dead, seen.mails) == (3, 2, 0)
        assert (await redrive(job, every())).done == 3
        await eventually(lambda: letters_are(job, 6))
        await job.caught_up()
        after = (await job.dead_letters())[3:]
        assert sorted(d["redriven_from"] for d in after) == [d["id"] for d in before]
        origin = {d["id"]: d for d in before}
        for letter in after:
            first = origin[letter["redriven_from"]]
            for name in ("reason", "body", "batch_id", "item_index", "source_stream", "source_partition"):
                assert letter[name] == first[name], name
        assert {letter["id"] for letter in await listed(job)} == {d["id"] for d in after}
        assert await job.sql("SELECT * FROM import_batches") == counted
        shown = await job.batch(batch)
        assert (shown.total, shown.sent, shown.rejected, shown.times_received) == (3, 2, 1, 1)
        assert (await redrive(job, Wish(Filter(ids=[d["id"] for d in before], open_only=False), "ana"))).done == 0


async def letters_are(looks: Looks, count: int) -> None:
    """So many dead letters exist."""
    assert len(await looks.dead_letters()) == count


async def test_registration_is_mailed_when_it_is_redriven_after_the_rule_was_mended(site: Site, sink: Sink) -> None:
    """In its old place: the batch counts it as sent then, and as rejected no more."""
    async with Job(site, sink) as job:
        batch = await job.publish([person(1), person(2, agent_email="nobody"), person(3)])
        await job.settled(2)
        assert (await job.batch(batch)).rejected == 1
        await job.sql("UPDATE dead_letters SET body = :body", body=json.dumps(person(2)).encode())  # the mended rule
        assert (await outlook(job, every())).mails == 1
        assert (await redrive(job, every())).done == 1
        await job.settled(3)
        assert job.mails() == {address(n): 1 for n in (1, 2, 3)}
        shown = await job.batch(batch)
        assert (shown.total, shown.sent, shown.rejected, shown.times_received) == (3, 3, 0, 1)
        assert (await job.row(2))["batch_index"] == 1


async def test_rows_are_redriven_and_records_stay_open_when_the_log_is_away(embedded_site: Site, sink: Sink) -> None:
    """Rows need no log. It says how far it came, and the same command does the rest later."""
    async with Looks(embedded_site, sink) as looks:
        await failed_rows(looks, 1)
        imports = looks.settings.imports_stream
        await lay_all(looks, DeadLetter("splitter", imports, 0, "not_json", "e", offset=9, body=bare(b"{}")))
        away = looks.environment | {"LOG_URL": f"embedded:///{embedded_site.folder}/nowhere/log.db"}
        done = await afluente(away, "dead-letters", "redrive", "--all")
        assert (done.code, done.out) == (ExitCode.LOG_REFUSED, "1 redriven\n")
        assert "1 left: the same command goes on when the log is there" in done.err
        assert (await looks.row(1))["status"] == "pending"
        assert (await redrive(looks, every())).done == 1


# ---- which, and how many


async def test_dry_run_says_how_many_mails_follow(services_site: Site, sink: Sink) -> None:
    """And changes nothing; then exactly so many go out."""
    command = ["dead-letters", "redrive", "--processor", "mailer", "--reason", "attempts_used_up"]
    async with Job(services_site, sink) as job:
        await failed_rows(job, 4)
        await job.sql('UPDATE email_dispatches SET held = true WHERE "to" = :to', to=address(4))
        await job.put(b"no message")
        await eventually(lambda: letters_are(job, 5))
        rows = await job.rows()
        assert (await outlook(job, every())).mails == 3
        said = await afluente(job.environment, *command, "--dry-run")
        assert said.out == (
            "3 would be redriven\n1 not: held, for its mail may have arrived: --include-unknown releases it\n"
            "mails that would follow: 3; events: 0; nothing was changed\n"
        )
        assert await job.rows() == rows
        done = await afluente(job.environment, *command)
        assert done.out.startswith("3 redriven\n1 not: held")
        await job.settled(4)
        assert job.mails().total() == 3
        assert len(await listed(job)) == 2


async def test_filters_choose_by_reason_processor_batch_and_age(site: Site, sink: Sink) -> None:
    """Each alone, and together."""
    async with Looks(site, sink) as looks:
        await lay_all(
            looks,
            DeadLetter("splitter", "imports", 0, "not_json", "e", offset=1, body=b"1"),
            DeadLetter("splitter", "imports", 0, "invalid_registration", "e", item_index=1, batch_id="ab12", body=b"2"),
            DeadLetter("mailer", "recipients", 2, "undecodable", "e", offset=1, body=b"3"),
        )
        past = (await looks.sql("SELECT min(id) AS id FROM dead_letters"))[0]["id"]
        await looks.sql(
            "UPDATE dead_letters SET created_at = '2026-01-01 00\\:00\\:00+00\\:00' WHERE id = :id", id=past
        )
        chosen: dict[str, dict[str, Any]] = {
            "splitter": {"processor": "splitter"},
            "undecodable": {"reason": "undecodable"},
            "batch": {"batch": "ab"},
            "old": {"older": 3600.0},
            "new": {"newer": 3600.0},
            "none": {"newer": 3600.0, "reason": "not_json"},
        }
        found = {name: [x["reason"] for x in await listed(looks, **wanted)] for name, wanted in chosen.items()}
    assert found == {
        "splitter": ["invalid_registration", "not_json"],
        "undecodable": ["undecodable"],
        "batch": ["invalid_registration"],
        "old": ["not_json"],
        "new": ["undecodable", "invalid_registration"],
        "none": [],
    }


async def test_letter_is_shown_with_its_bytes_only_when_they_are_asked_for(embedded_site: Site, sink: Sink) -> None:
    """They are people's data."""
    async with Looks(embedded_site, sink) as looks:
        body = json.dumps(person(1)).encode()
        await lay_all(looks, DeadLetter("splitter", "imports", 0, "not_json", "[bold] is no JSON", offset=1, body=body))
        [letter] = await looks.dead_letters()
        shown = await afluente(looks.environment, "dead-letters", "show", str(letter["id"]))
        assert address(1) not in shown.out
        assert json.loads(shown.out)["body_bytes"] == len(body)
        assert (
            await afluente(looks.environment, "dead-letters", "show", str(letter["id"]), "--body")
        ).out.encode() == body
        table = await afluente(looks.environment, "dead-letters", "list", "--newer", "1h", "--processor", "splitter")
        assert "[bold] is no JSON" in table.out
        assert "1 open:" in table.out
        lines = await afluente(looks.environment, "dead-letters", "list", "--json", "--all")
        assert [json.loads(line)["id"] for line in lines.out.splitlines()] == [letter["id"]]
        missing = await afluente(looks.environment, "dead-letters", "show", "99")
        assert (missing.code, missing.err) == (ExitCode.BAD_INPUT, "afluente: there is no dead letter 99\n")
