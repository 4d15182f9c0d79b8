"""A paused processor takes nothing more, and goes on exactly where it stopped (O-47)."""

from processors import _replay
from processors._demo.sink import Sink
from streams.testing import eventually
from tests.support.job import Job, address, people
from tests.support.sites import Site


async def set_paused(job: Job, paused: bool, processor: str = "mailer") -> None:
    """As the command does, once each partition has begun."""
    partitions = 3 if processor == "mailer" else 1

    async def all_have_begun() -> None:
        job.check()
        rows = await job.sql("SELECT 1 FROM processor_offsets WHERE processor = :p", p=processor)
        assert len(rows) == partitions

    await eventually(all_have_begun)
    assert await _replay.set_paused(job.engine, processor, paused, "tests" if paused else None, "ana") == partitions


async def sent_are_at_least(job: Job, count: int) -> None:
    """So many mails have come."""
    job.check()
    assert len(job.sink.mails) >= count


async def stopped(job: Job) -> int:
    """Wait until nothing is in flight any more; answers how many were mailed."""
    await job.noticed("mailer")

    async def is_quiet() -> int:
        job.check()
        assert await job.count("lease_until IS NOT NULL") == 0
        return len(job.sink.mails)

    return await eventually(is_quiet)


async def test_each_is_mailed_once_when_paused_in_the_middle_by_a_person(site: Site, sink: Sink) -> None:
    """Nothing goes out meanwhile, over a restart as well; then the rest does, and nobody twice."""
    total = 600
    sink.script("dot", delay=0.02)  # so that the pause meets it in the middle on any machine
    async with Job(site, sink, SLOTS=4, TURN_RECORDS=50) as job:
        await job.publish(people(total))
        await eventually(lambda: sent_are_at_least(job, 150))
        await set_paused(job, True)
        mailed = await stopped(job)
        assert 150 <= mailed < total
        await job.stop()
        await job.start()
        await job.noticed("mailer")
        assert [p.paused_reason for p in (await job.status()).processors if p.processor == "mailer"] == ["tests"] * 3
        assert len(sink.mails) == mailed
        await set_paused(job, False)
        await job.settled(total)
        assert job.mails() == {address(n): 1 for n in range(1, total + 1)}
        assert all(not p.paused for p in (await job.status()).processors)


async def test_each_is_mailed_once_when_an_error_stops_everything_in_the_middle(site: Site, sink: Sink) -> None:
    """The mail server goes away: nothing more is claimed, no attempt is used up, and it goes on by itself."""
    total = 300
    sink.script("dot", delay=0.01)
    async with Job(site, sink, SLOTS=4, BREAKER_THRESHOLD=4, MAX_ATTEMPTS=5) as job:
        await job.publish(people(total))
        await eventually(lambda: sent_are_at_least(job, 80))
        sink.script("connect", do="close")
        sink.script("mail", reply="421 closing")

        def is_open() -> None:
            assert job.metric("afluente_breaker_open", processor="mailer") == 1

        await eventually(is_open)
        sink.forget()
        await job.settled(total)
        assert job.mails() == {address(n): 1 for n in range(1, total + 1)}
        assert await job.count("attempts > 2") == 0


async def test_splitter_goes_on_where_it_stopped_when_it_was_paused(site: Site, sink: Sink) -> None:
    """Batches wait in the stream; each is split once."""
    async with Job(site, sink) as job:
        first = await job.publish(people(5))
        await job.settled(5)
        await set_paused(job, True, "splitter")
        await job.noticed("splitter")
        second = await job.publish(people(8))
        await job.noticed("splitter")
        assert [b.batch_id for b in (await job.status()).batches] == [first]
        await set_paused(job, False, "splitter")
        await job.settled(8)
        assert (await job.batch(second)).times_received == 1
        assert job.mails() == {address(n): 1 for n in range(1, 9)}


async def test_retry_waits_when_paused_and_runs_when_resumed(site: Site, sink: Sink) -> None:
    """The relay has no position: what it publishes waits in the stream."""
    sink.script("rcpt", reply="451 later", recipient=address(1), times=1)
    async with Job(site, sink, BACKOFF_SECONDS="600") as job:
        await job.publish(people(1))
        await eventually(lambda: waits(job))
        await set_paused(job, True)
        await job.noticed("mailer")
        await job.sql("UPDATE email_dispatches SET next_attempt_at = NULL")
        await eventually(lambda: hint_is_stored(job))
        await job.noticed("mailer")
        await waits(job)
        await set_paused(job, False)
        await job.settled(1)
        assert job.mails() == {address(1): 1}


async def waits(job: Job) -> None:
    """The first try is over, and there was no second."""
    row = await job.row(1)
    assert (row["status"], row["attempts"], row["lease_until"]) == ("pending", 1, None)


async def hint_is_stored(job: Job) -> None:
    """The relay has published the retry."""
    assert await job.stored() >= 2
