"""The database fails over, drops its sessions or commits slowly in the middle of the job: no mail without its claim, no
outcome without its commit. PostgreSQL: SQLite has no server that could do any of it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncEngine

from processors._demo.sink import Sink
from processors._house import House, connect_log
from processors._serve import run_processors
from streams.database import connect
from streams.exit_codes import ExitCode
from streams.telemetry import Metrics
from streams.testing import eventually
from tests.support.job import PROCESSORS, Job, Looks, address, people
from tests.support.pod import Pod
from tests.support.sites import Site

COUNT = 150


async def name_of(looks: Looks) -> str:
    """The database of this test."""
    [row] = await looks.sql("SELECT current_database() AS name")
    return str(row["name"])


async def drop_sessions(looks: Looks) -> int:
    """End every session of the processors, as a restart or a failover does. Answers how many there were."""
    ended = await looks.sql(
        """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name <> 'test'"""
    )
    return len(ended)


async def test_writes_recover_without_a_restart_when_the_database_was_read_only(
    services_site: Site, sink: Sink
) -> None:
    """A failover: the sessions are dropped, and behind the same name is a server that takes no writes, until there is
    one that does. Sessions from between would answer every ping and refuse every write for ever (O-28)."""
    sink.script("dot", delay=0.02)
    async with Looks(services_site, sink, SLOTS=4) as looks, Pod(services_site.folder, looks.environment) as pod:
        name = await name_of(looks)
        await looks.publish(people(COUNT))
        await sink.wait_for(20)
        await looks.sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        await drop_sessions(looks)

        def is_refused() -> None:
            assert any("ReadOnly" in line["error"] for line in pod.events("database.away")), pod.log()[-2000:]

        await eventually(is_refused)
        await eventually(lambda: is_quiet(looks))
        assert looks.mails().total() <= await looks.count("attempts > 0")
        await looks.sql(f"ALTER DATABASE {name} SET default_transaction_read_only = off")
        await looks.settled(COUNT)
        assert looks.mails() == {address(n): 1 for n in range(1, COUNT + 1)}
        assert await looks.count("status = 'sent'") == COUNT


async def is_quiet(looks: Looks) -> None:
    """Nothing is under way at the mail server."""
    begun = sum(verb == "DATA" for verb, _ in looks.sink.commands)
    assert begun == len(looks.sink.mails)


async def test_each_is_mailed_once_when_the_database_drops_all_sessions_again_and_again(
    services_site: Site, sink: Sink
) -> None:
    """In the middle of plans, claims and commits whose answer never comes: no outcome is lost, nobody gets two."""
    sink.script("dot", delay=0.02)
    async with Job(services_site, sink, SLOTS=4, MAX_ATTEMPTS=9) as job:
        await job.publish(people(COUNT))
        for step in range(1, 6):
            await sink.wait_for(step * 20)
            await drop_sessions(job)
        await job.settled(COUNT, 60)
        assert job.mails() == {address(n): 1 for n in range(1, COUNT + 1)}
        assert await job.count("status = 'sent'") == COUNT
        assert await job.dead_letters() == []


SLOW_COMMITS = [
    """CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN PERFORM pg_sleep(0.1); RETURN NULL; END $$""",
    """CREATE CONSTRAINT TRIGGER slowly AFTER UPDATE ON processor_offsets DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION slowly()""",
]
"""Each commit that moves an offset takes a tenth of a second, after its statements have answered."""

FEW = 60
FEW_AND_SLOW = {"SLOTS": 4, "QUEUED_VISIBILITY_SECONDS": 60}
"""Nobody is to be reminded of a row that only waits for a slot: each reminder would be a slow commit of its own."""


async def test_what_is_reported_as_saved_is_saved_when_a_stop_meets_slow_commits(
    services_site: Site, sink: Sink
) -> None:
    """SIGTERM in the middle of a commit: exit 0, each mail is recorded, no session stays in a transaction (O-29)."""
    async with Looks(services_site, sink, **FEW_AND_SLOW) as looks:
        for statement in SLOW_COMMITS:
            await looks.sql(statement)
        await looks.publish(people(FEW))
        async with Pod(services_site.folder, looks.environment) as pod:
            await sink.wait_for(20)
            await pod.terminate()
            assert await pod.ended() == ExitCode.OK
        assert await looks.count("status = 'sent'") == len(sink.mails)
        assert await looks.count("lease_until IS NOT NULL") == 0
        await looks.sql("DROP TRIGGER slowly ON processor_offsets")
        async with Pod(services_site.folder, looks.environment):
            await looks.settled(FEW)
        assert looks.mails() == {address(n): 1 for n in range(1, FEW + 1)}


async def test_pool_stays_clean_when_processors_are_cancelled_in_slow_commits(services_site: Site, sink: Sink) -> None:
    """Cancelled in a commit, then others go on with the same pool: nothing that they write is lost (O-29)."""
    async with Looks(services_site, sink, **FEW_AND_SLOW) as looks:
        for statement in SLOW_COMMITS:
            await looks.sql(statement)
        await looks.publish(people(FEW))
        engine = connect(services_site.database_url, "job", pool_size=10)
        async with processors_of(looks, engine):
            await sink.wait_for(20)
            await eventually(lambda: commits(looks))
        await eventually(lambda: has_no_open_transaction(looks))
        async with processors_of(looks, engine):
            await looks.settled(FEW)
        await engine.dispose()
        assert await looks.count("status = 'sent'") == FEW
        assert set(looks.mails()) == {address(n) for n in range(1, FEW + 1)}
        assert looks.mails().total() - FEW <= await looks.count("doubts > 0") <= 4


@asynccontextmanager
async def processors_of(looks: Looks, engine: AsyncEngine) -> AsyncIterator[None]:
    """The processors on this engine for the time of the block; then they are cancelled wherever they are."""
    log = connect_log(looks.settings, "job")
    await log.open()
    house = House(looks.settings, log, engine, Metrics(CollectorRegistry()))
    running = asyncio.create_task(run_processors(house, PROCESSORS, asyncio.Event()))
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait({running})
        await log.close()


_SESSIONS = "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'job'"


async def commits(looks: Looks) -> None:
    """A session of the processors is in the slow part of its commit."""
    [row] = await looks.sql(f"{_SESSIONS} AND wait_event = 'PgSleep'")
    assert row["n"] > 0


async def has_no_open_transaction(looks: Looks) -> None:
    """No session of the processors is in a transaction, at work or idle."""
    [row] = await looks.sql(f"{_SESSIONS} AND xact_start IS NOT NULL")
    assert row["n"] == 0
