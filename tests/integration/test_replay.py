"""A processor reads on elsewhere, on both sites: nobody is mailed again, and only who has no row is mailed at all."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from models.dispatches import IMPORT_MAILABLE_TYPE
from models.registration import parse_registration
from processors import _replay
from processors._compose import PROCESSORS, readers
from processors._demo.sink import Sink
from processors._replay import Move, NoSuchPlace, Outlook, Place
from processors.sync.processor import event_message
from streams.exit_codes import ExitCode
from streams.message import Message
from streams.testing import eventually
from tests.conftest import Services
from tests.support.broker import Management
from tests.support.command import afluente
from tests.support.databases import from_now
from tests.support.job import Job, Looks, address, bare, people, person
from tests.support.sites import Site
from tests.support.tcpproxy import TcpProxy

MANY = 2_000


async def find(looks: Looks, processor: str, place: Place, only: int | None = None) -> list[Move]:
    """The moves that the command would make."""
    stream = readers(looks.settings)[processor]
    return await _replay.find(looks.engine, looks.log, processor, stream, place, only)


async def replay(looks: Looks, processor: str, place: Place, only: int | None = None) -> Outlook:
    """Do what the command does; answers what its dry run would have said right before."""
    moves = await find(looks, processor, place, only)
    new_keys = PROCESSORS[processor].new_keys
    assert new_keys is not None
    outlook = await _replay.forecast(looks.engine, looks.log, moves, new_keys)
    await _replay.replay(looks.engine, processor, moves, "ana")
    return outlook


async def sent_rows(looks: Looks, batch: str, count: int) -> None:
    """Rows of the batch of `people(count)` that were mailed before."""
    rows = [parse_registration(person(number)) for number in range(1, count + 1)]
    values = [{"to": r.agent_email, "meta": r._asdict(), "key": r.key, "index": n} for n, r in enumerate(rows)]
    source = 'json_to_recordset(CAST(:rows AS json)) AS x("to" text, meta text, "key" text, "index" int)'
    if looks.site.kind == "embedded":
        names = ("to", "meta", "key", "index")
        fields = ", ".join(f"json_extract(value, '$.{name}') AS \"{name}\"" for name in names)
        source = f"(SELECT {fields} FROM json_each(:rows)) AS x"
    await looks.sql(
        f"""INSERT INTO email_dispatches ("to", subject, content, mailable_type, meta, idempotency_key, batch_id,
            batch_index, status, sent_at, attempts, claim_no)
        SELECT "to", 's', 'c', '{IMPORT_MAILABLE_TYPE}', {"CAST(meta AS json)" if "CAST" in source else "meta"}, "key",
            '{batch}', "index", 'sent', {from_now(looks.engine, 0)}, 1, 1 FROM {source}""",
        rows=json.dumps(values),
    )


async def forget(looks: Looks, *numbers: int) -> None:
    """Delete the rows of these people."""
    for number in numbers:
        await looks.sql('DELETE FROM email_dispatches WHERE "to" = :to', to=address(number))


async def positions(looks: Looks, processor: str) -> list[dict[str, Any]]:
    """Its saved positions, by partition."""
    return await looks.sql(
        "SELECT * FROM processor_offsets WHERE processor = :processor ORDER BY partition", processor=processor
    )


# ---- nobody is mailed twice


async def test_nobody_is_mailed_when_mailer_or_splitter_is_replayed_over_many_who_were(site: Site, sink: Sink) -> None:
    """In seconds, without a restart, without a new or a changed row; the splitter's messages are not swallowed."""
    async with Looks(site, sink) as looks:
        batch = await looks.publish(people(MANY))
        await sent_rows(looks, batch, MANY)
    async with Job(site, sink, mailers=2) as job:
        await job.caught_up()
        rows = await job.rows()
        for processor, records in (("mailer", MANY), ("splitter", 1)):
            stored = await job.stored()
            assert await replay(job, processor, Place(offset=0)) == Outlook(records, 0, 0)
            await job.caught_up()
            assert {p["epoch"] for p in await positions(job, processor)} == {1}
            assert await job.stored() == stored + (MANY if processor == "splitter" else 0)
        assert sink.mails == []
        assert await job.rows() == rows
        seen = await job.batch(batch)
        assert (seen.total, seen.sent, seen.times_received) == (MANY, MANY, 1)


@pytest.mark.parametrize("processor", ["mailer", "splitter"])
async def test_exactly_those_without_a_row_are_mailed_when_replayed(site: Site, sink: Sink, processor: str) -> None:
    """Three of many were deleted; the dry run names that number before."""
    async with Looks(site, sink) as looks:
        batch = await looks.publish([*people(200), person(201, agent_email=None)])
        await looks.put(bare(b"no list"))
        await sent_rows(looks, batch, 200)
    async with Job(site, sink) as job:
        await job.caught_up()
        await forget(job, 3, 50, 199)
        outlook = await replay(job, processor, Place(first=True))
        assert outlook == (Outlook(200, 0, 3) if processor == "mailer" else Outlook(2, 1, 3))
        await job.settled(200)
        assert job.mails() == {address(n): 1 for n in (3, 50, 199)}
        assert len(await job.dead_letters()) == 2


async def test_one_partition_is_replayed_when_it_is_named(site: Site, sink: Sink) -> None:
    """The others stay where they are."""
    async with Job(site, sink) as job:
        await job.publish(people(30))
        await job.settled(30)
        before = await positions(job, "mailer")
        await replay(job, "mailer", Place(offset=2), only=1)
        await job.caught_up()
        after = await positions(job, "mailer")
        assert [p["epoch"] for p in after] == [0, 1, 0]
        assert [p["next_offset"] for p in after] == [p["next_offset"] for p in before]
        assert job.mails().total() == 30


async def test_failed_and_waiting_rows_stay_as_they_are_when_replayed(site: Site, sink: Sink) -> None:
    """A record is only a hint: the row decides."""
    sink.script("rcpt", reply="550 no such mailbox", recipient=address(1))
    async with Job(site, sink, BACKOFF_SECONDS="0.1") as job:
        await job.publish(people(3))
        await job.settled(3)
        never = from_now(job.engine, 3600)
        await job.sql(
            f"""UPDATE email_dispatches SET status = 'pending', sent_at = NULL, next_attempt_at = {never}
            WHERE "to" = :to""",
            to=address(2),
        )
        rows = await job.rows()
        assert (await replay(job, "mailer", Place(first=True))).mails == 0
        await job.caught_up()
        assert await job.rows() == rows


# ---- what is passed over


async def test_only_new_records_are_handled_when_the_connection_is_cut_at_next(
    services_site: Site, sink: Sink, services: Services
) -> None:
    """It starts at the end, hears nothing, loses its connection, and does not begin at 0 (O-26)."""
    async with TcpProxy(services.stream_port) as proxy:
        url = services_site.log_url.replace(f":{services.stream_port}/", f":{proxy.port}/")
        async with Looks(services_site, sink) as looks:
            await looks.put(*(recipient(n) for n in range(1, 101)), stream=looks.settings.recipients_stream)
            assert [m.passed for m in await find(looks, "mailer", Place(next=True))] == [100, 0, 0]
            await replay(looks, "mailer", Place(next=True))
        async with Job(services_site, sink, LOG_URL=url, processors=["mailer"]) as job:
            await job.noticed("mailer")  # it has subscribed everywhere
            assert proxy.cut() >= 3
            await job.put(recipient(101), stream=job.settings.recipients_stream)
            await job.settled(1)
            assert job.mails() == {address(101): 1}


def recipient(number: int) -> bytes:
    """The splitter's message for a person."""
    registration = parse_registration(person(number))
    body = {"mailable": "import_registration", "batch": "b" * 64, "index": number, "data": registration._asdict()}
    return Message(registration.key, "recipient", 1, 1, json.dumps(body).encode()).encode()


async def test_command_asks_before_it_passes_over_records_that_nobody_has_read(embedded_site: Site, sink: Sink) -> None:
    """The only one that loses somebody: it says how many, and does it when told so; asked beside running processors."""
    command = ["replay", "mailer", "--next", "--by", "ana"]
    async with Job(embedded_site, sink) as job:
        await job.publish(people(3))
        await job.settled(3)
        await afluente(job.environment, "pause", "mailer", "--reason", "tests", "--by", "ana")
        await job.noticed("mailer")
        await job.publish([*people(3), person(4), person(5)])
        await eventually(lambda: are_published(job, 8))
        before = await positions(job, "mailer")
        dry = await afluente(job.environment, *command, "--dry-run")
        assert "5 records that nobody has read would never be read\nnothing was changed" in dry.out
        refused = await afluente(job.environment, *command, stdin=b"n\n")
        assert refused.code == ExitCode.FAILED
        assert "5 records that nobody has read would never be read" in refused.err
        assert [p["epoch"] for p in await positions(job, "mailer")] == [p["epoch"] for p in before]
        done = await afluente(job.environment, *command, "--yes")
        assert (done.code, done.err) == (ExitCode.OK, "")
        assert "when it is resumed" in done.out
        await afluente(job.environment, "resume", "mailer", "--by", "ana")
        await job.caught_up()
        assert job.mails().total() == 3
        audits = await job.sql("SELECT * FROM audits WHERE auditable_type = 'processor_offsets' ORDER BY id")
        assert [a["event"] for a in audits] == ["pause"] * 3 + ["replay"] * 3 + ["resume"] * 3
        assert {a["tags"] for a in audits} == {f"afluente {event} by ana" for event in ("pause", "replay", "resume")}
        values = [json.loads(a["new_values"]) for a in audits if a["event"] == "replay"]
        assert sum(v["passed"] for v in values) == 5
        assert [(v["processor"], v["partition"]) for v in values] == [("mailer", n) for n in range(3)]


async def are_published(job: Job, count: int) -> None:
    """The splitter has published so many."""
    assert await job.stored() == count


async def test_dry_run_of_sync_says_how_many_requests_would_follow(site: Site, sink: Sink) -> None:
    """Of the events that records point at, twice or once: those that are pending, due, and in nobody's hand."""
    states = {
        "due": "'pending', NULL, NULL",
        "again": "'pending', {past}, {past}",
        "later": "'pending', {future}, NULL",
        "in flight": "'pending', NULL, {future}",
        "sent": "'sent', NULL, NULL",
        "failed": "'failed', NULL, NULL",
    }
    async with Looks(site, sink) as looks:
        times = {"past": from_now(looks.engine, -60), "future": from_now(looks.engine, 600)}
        for number, state in enumerate(states.values(), 1):
            await looks.sql(
                f"""INSERT INTO outbox_events (id, event_name, payload, status, next_attempt_at, lease_until)
                VALUES ({number}, 'e', '{{"n": 1}}', {state.format(**times)})"""
            )
        hints = [event_message({"id": number, "attempts": 0}).encode() for number in (1, 2, 3, 4, 5, 6, 1, 4711)]
        await looks.put(*hints, b"\0 no message", stream=looks.settings.outbox_stream)
        dry = await afluente(looks.environment, "replay", "sync", "--first", "--dry-run")
    assert "would read 9 records, 1 of which cannot be taken; requests that would follow: 2\nnothing was" in dry.out


# ---- places that are not there


async def test_place_that_is_not_there_is_refused_with_what_is(embedded_site: Site, sink: Sink) -> None:
    """A slip of the pen must not become a jump."""
    async with Looks(embedded_site, sink) as looks:
        await looks.publish(people(1))
        with pytest.raises(NoSuchPlace, match="has no partition 3: it has partitions 0 to 2"):
            await find(looks, "mailer", Place(first=True), only=3)
        with pytest.raises(NoSuchPlace, match="has no partition 1: it has partition 0 only"):
            await find(looks, "splitter", Place(first=True), only=1)
        with pytest.raises(NoSuchPlace, match="ends at 1, before 2; say --next, or --clamp"):
            await find(looks, "splitter", Place(offset=2))
        [move] = await find(looks, "splitter", Place(offset=2, clamp=True))
        assert (move.to, move.records, move.passed) == (1, 0, 1)
        refused = await afluente(looks.environment, "replay", "splitter", "--from-offset", "2")
        assert refused.code == ExitCode.USAGE
        assert "ends at 1, before 2" in refused.err
        assert await positions(looks, "splitter") == []


async def test_first_record_since_a_time_is_found(site: Site, sink: Sink) -> None:
    """By the times at which the log wrote them; a time after all of them is the end."""
    async with Looks(site, sink) as looks:
        for number in range(1, 4):
            await looks.publish([person(number)])
            await eventually(lambda: clock_moves(looks))
        [partition] = await looks.log.partitions(looks.settings.imports_stream)
        times = [await looks.log.written_at(partition, offset) for offset in range(3)]
        assert None not in times
        assert len(set(times)) == 3
        for offset, written_ms in enumerate(times):
            at = datetime.fromtimestamp((written_ms or 0) / 1000, UTC)
            [move] = await find(looks, "splitter", Place(since=at))
            assert move.to == offset
            [move] = await find(looks, "splitter", Place(since=at + timedelta(milliseconds=1)))
            assert move.to == offset + 1
        [move] = await find(looks, "splitter", Place(since=datetime(2026, 1, 1, tzinfo=UTC)))
        assert move.to == 0


_LAST: dict[int, float] = {}


async def clock_moves(looks: Looks) -> None:
    """Some milliseconds have passed since the last record."""
    last = _LAST.setdefault(id(looks), await looks.now())
    now = await looks.now()
    assert now > last + 0.005
    _LAST[id(looks)] = now


# ---- halted


async def test_halted_partition_goes_on_without_restart_when_it_is_replayed(site: Site, sink: Sink) -> None:
    """Status, probe and metric say so until then; 'next' counts all that is there, for nothing of it was read."""
    async with Job(site, sink, STREAM_SEGMENT_BYTES=200_000, STREAM_MAX_BYTES=600_000) as job:
        await job.publish(people(3))
        await job.settled(3)
        await job.stop()
        [partition, *_] = await job.log.partitions(job.settings.recipients_stream)
        for _ in range(20):
            await job.put(*[b"." * 1_000] * 100, stream=job.settings.recipients_stream)

        async def is_truncated() -> None:
            assert (await job.log.bounds(partition)).first > 3

        await eventually(is_truncated)
        await job.start()

        async def is_halted(halted: bool) -> None:
            job.check()
            labels = {"processor": "mailer", "stream": partition.stream, "partition": "0"}
            assert job.metric("afluente_partition_halted", **labels) == halted
            [shown] = [s for s in (await job.status()).processors if s.processor == "mailer" and s.partition == 0]
            assert bool(shown.halted_reason) == halted

        await eventually(lambda: is_halted(True))
        bounds = await job.log.bounds(partition)
        [move] = await find(job, "mailer", Place(next=True), only=0)
        assert move.passed == bounds.next - bounds.first
        with pytest.raises(NoSuchPlace, match="retention has dropped what was before"):
            await find(job, "mailer", Place(offset=move.was), only=0)
        with pytest.raises(NoSuchPlace, match="retention may have dropped records since then"):
            await find(job, "mailer", Place(since=datetime(2026, 1, 1, tzinfo=UTC)), only=0)
        outlook = await replay(job, "mailer", Place(offset=move.was, clamp=True), only=0)
        assert outlook.dead == outlook.records
        # RabbitMQ's note of the splitter's name takes an offset in each segment
        assert outlook.records in range(bounds.next - bounds.first - 4, bounds.next - bounds.first + 1)
        await job.caught_up()
        await eventually(lambda: is_halted(False))
        await job.put(recipient(9), stream=partition.stream)
        await job.settled(4)
        assert job.mails()[address(9)] == 1


async def test_partition_of_a_stream_made_anew_goes_on_when_it_is_replayed(services_site: Site, sink: Sink) -> None:
    """The saved offset means nothing there: it halts, and reads on from the first record when told so."""
    async with Job(services_site, sink) as job:
        await job.publish(people(2))
        await job.publish([person(3)])
        await job.settled(3)
        await job.stop()
        await delete_imports(job)
        await job.publish([person(4)])
        await job.start()

        async def is_halted() -> None:
            [saved] = await positions(job, "splitter")
            assert "made anew" in (saved["halted_reason"] or "")

        await eventually(is_halted)
        outlook = await replay(job, "splitter", Place(first=True))
        assert (outlook.records, outlook.mails) == (1, 1)
        await job.settled(4)
        assert job.mails() == {address(n): 1 for n in range(1, 5)}


async def delete_imports(job: Job) -> None:
    """Somebody deletes the stream."""
    await Management(Services()).delete(job.settings.imports_stream)
