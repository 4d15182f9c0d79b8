"""`afluente run` as a process of its own: how it starts, what its probes tell, and how it ends."""

import asyncio
import json
import signal
import urllib.error
import urllib.request
from asyncio.subprocess import Process
from collections.abc import Mapping

import pytest

from processors._demo.sink import Sink
from streams.exit_codes import ExitCode
from streams.testing import eventually
from tests.support.command import afluente, started
from tests.support.job import Looks, people
from tests.support.sites import Site

PATIENCE = 30.0


async def probes_port(process: Process) -> int:
    """The port that it says it answers probes on."""
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE):
        async for line in process.stderr:
            if (said := json.loads(line)).get("event") == "process.started":
                return int(said["probes_port"])
    raise AssertionError("it ended before it had started")


async def probe(port: int, path: str) -> tuple[int, str]:
    """Status and body of a probe."""

    def ask() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(ask)


async def is_ready(port: int) -> None:
    """An AssertionError until it is ready."""
    assert await probe(port, "/readyz") == (200, "ok\n")


async def ended(process: Process) -> tuple[int, str]:
    """Exit code, and the rest of its log."""
    _, err = await asyncio.wait_for(process.communicate(), PATIENCE)
    return process.returncode or 0, err.decode()


async def test_batch_is_mailed_and_the_process_ends_well_when_it_is_asked_to(site: Site, sink: Sink) -> None:
    """All processors in one process, from the first probe to SIGTERM."""
    async with Looks(site, sink) as looks, started(looks.environment, "run", "all") as process:
        port = await probes_port(process)
        await eventually(lambda: is_ready(port))

        await looks.publish(people(10))
        await looks.settled(10)
        metrics = (await probe(port, "/metrics"))[1]
        process.send_signal(signal.SIGTERM)
        code, _ = await ended(process)

    assert code == ExitCode.OK
    assert sum(looks.mails().values()) == 10
    assert 'afluente_acts_total{outcome="sent",processor="mailer"} 10.0' in metrics


async def test_process_is_not_ready_when_a_partition_is_halted(embedded_site: Site, sink: Sink) -> None:
    """Alive, but a person has to act: the probe names the processor and the partition."""
    stream = f"{embedded_site.name}-recipients"
    async with Looks(embedded_site, sink) as looks:
        # a saved position behind the end: the stream is not the one that was read
        await looks.sql(
            """INSERT INTO processor_offsets (processor, stream, partition, next_offset, updated_at)
            VALUES ('mailer', :stream, 1, 5, CURRENT_TIMESTAMP)""",
            stream=stream,
        )
        async with started(looks.environment, "run", "all") as process:
            port = await probes_port(process)

            async def halted() -> None:
                code, text = await probe(port, "/readyz")
                assert code == 503
                assert f"mailer is halted at {stream} 1" in text

            await eventually(halted)
            assert (await probe(port, "/livez"))[0] == 200


async def test_start_before_the_migration_says_so(embedded_site: Site, sink: Sink) -> None:
    """Its own exit code, a sentence, no traceback."""
    empty = f"sqlite+aiosqlite:///{embedded_site.folder / 'empty.db'}"

    done = await afluente(embedded_site.environment(sink, DATABASE_URL=empty), "run", "all")

    assert done.code == ExitCode.NOT_MIGRATED
    assert "afluente migrate" in done.err
    assert "Traceback" not in done.err


async def test_second_set_on_an_embedded_log_is_refused_by_name(embedded_site: Site, sink: Sink) -> None:
    """It says which process has the file; that one goes on."""
    async with Looks(embedded_site, sink) as looks, started(looks.environment, "run", "all") as first:
        port = await probes_port(first)
        await eventually(lambda: is_ready(port))
        await looks.publish(people(1))
        await looks.settled(1)

        second = await afluente(looks.environment, "run", "mailer")

        assert second.code == ExitCode.LOG_IN_USE
        assert str(first.pid) in second.err
        assert "Traceback" not in second.err
        await looks.publish(people(2))
        await looks.settled(2)


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"LOG_URL": "rabbitmq-stream://afluente:wrong@{host}/"}, ExitCode.LOG_REFUSED, "AuthenticationFailure"),
        ({"RECIPIENTS_PARTITIONS": "5"}, ExitCode.LOG_REFUSED, "exists with 3 partitions, asked for are 5"),
        ({"DATABASE_URL": "postgresql+asyncpg://nobody@{database}"}, ExitCode.BAD_SETTINGS, "DATABASE_URL"),
        ({"LEASE_SECONDS": "1"}, ExitCode.BAD_SETTINGS, "LEASE_SECONDS >="),
        ({"MAIL_TEMPLATES": "/tmp"}, ExitCode.BAD_SETTINGS, "mail template"),
    ],
)
async def test_process_names_what_is_wrong_when_it_cannot_start(
    services_site: Site, sink: Sink, change: Mapping[str, str], code: ExitCode, says: str
) -> None:
    """Whoever started it need not read a traceback."""
    host = services_site.log_url.rpartition("@")[2].rstrip("/")
    database = services_site.database_url.rpartition("@")[2]
    wrong = {name: value.format(host=host, database=database) for name, value in change.items()}
    async with Looks(services_site, sink) as looks:
        done = await afluente(looks.environment | wrong, "run", "all")

    assert done.code == code, done.err
    assert says in done.err
    assert "Traceback" not in done.err


async def test_process_ends_at_once_when_it_is_stopped_while_it_waits_for_its_services(
    services_site: Site, sink: Sink, unused_tcp_port: int
) -> None:
    """A start that waits for a database has nothing to finish."""
    away = services_site.environment(
        sink, DATABASE_URL=f"postgresql+asyncpg://postgres@127.0.0.1:{unused_tcp_port}/x", SHUTDOWN_GRACE_SECONDS=20
    )
    async with started(away, "run", "mailer") as process:
        port = await probes_port(process)
        code, text = await probe(port, "/readyz")
        assert (code, "starting" in text) == (503, True)

        process.send_signal(signal.SIGTERM)
        ended_with, err = await ended(process)

    assert ended_with == ExitCode.OK
    assert "grace_over" not in err
