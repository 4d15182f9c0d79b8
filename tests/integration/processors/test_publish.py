"""`afluente publish`, from a process of its own, into both logs."""

import json
import re
from pathlib import Path

import pytest

from models.slices import batch_id
from processors._demo.sink import Sink
from processors._status import BatchStatus
from streams.exit_codes import ExitCode
from streams.testing import eventually
from tests.support.command import afluente
from tests.support.job import Job, Looks, address, people, person
from tests.support.sites import Site


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A list with a comma too many in its second line."""
    file = tmp_path / "broken.json"
    file.write_bytes(b'[{"registration": 1},\n {"registration": 2,}]')
    return file


async def test_batch_is_mailed_when_it_is_published_beside_running_processors(site: Site, sink: Sink) -> None:
    """Also on the embedded log, whose processors have claimed the file."""
    body = json.dumps(people(5)).encode()
    (site.folder / "batch.json").write_bytes(body)

    async with Job(site, sink) as job:
        done = await afluente(job.environment, "publish", str(site.folder / "batch.json"))
        await job.settled(5)

        assert done.code == ExitCode.OK, done.err
        assert f"batch {batch_id(body)}: 5 registrations in 1 record of {site.name}-imports" in done.out
        assert set(job.mails()) == {address(n) for n in range(1, 6)}


async def test_large_list_is_cut_into_records_that_are_one_batch(site: Site, sink: Sink) -> None:
    """6,000 registrations do not fit one record; their batch is named once and is whole."""
    body = json.dumps(people(6_000)).encode()

    async with Job(site, sink, processors=["splitter"]) as job:
        done = await afluente(job.environment, "publish", "-", stdin=body)
        batch = await eventually(lambda: whole(job, batch_id(body), 6_000))

    assert done.code == ExitCode.OK, done.err
    assert re.search(r"6,000 registrations in [2-9] records", done.out)
    assert (batch.total, batch.waiting, batch.times_received) == (6_000, 6_000, 1)


async def whole(job: Job, batch: str, total: int) -> BatchStatus:
    """The batch when all of it was split, until then an AssertionError."""
    [row] = await job.sql("SELECT coalesce(sum(received), 0) AS n FROM import_batches WHERE batch_id = :id", id=batch)
    assert row["n"] == total
    return await job.batch(batch)


async def test_item_above_the_limit_is_reported_and_rejected_alone(site: Site, sink: Sink) -> None:
    """It is no reason to lose the others, and it is counted."""
    items = [person(1), person(2, agent_name="x" * 600_000), person(3)]

    async with Job(site, sink) as job:
        done = await afluente(job.environment, "publish", "-", stdin=json.dumps(items).encode())
        await job.settled(2)
        [letter] = await job.dead_letters()

    assert "item 1 has 600," in done.err
    assert (letter["item_index"], letter["reason"]) == (1, "too_large")


async def test_nothing_is_published_when_the_file_is_no_list(site: Site, sink: Sink, broken: Path) -> None:
    """The file, what is wrong and where; and no record."""

    async with Looks(site, sink) as looks:
        done = await afluente(looks.environment, "publish", str(broken))
        [imports] = await looks.log.partitions(looks.settings.imports_stream)

        assert done.code == ExitCode.BAD_INPUT
        assert "broken.json" in done.err
        assert "line 2" in done.err
        assert "Traceback" not in done.err
        assert (await looks.log.bounds(imports)).next == 0


async def test_log_that_does_not_answer_is_named(services_site: Site, sink: Sink, unused_tcp_port: int) -> None:
    """With its own exit code, and without the password."""
    log_url = f"rabbitmq-stream://somebody:secret@127.0.0.1:{unused_tcp_port}/"
    environment = services_site.environment(sink, LOG_URL=log_url)

    done = await afluente(environment, "publish", "-", stdin=b"[]")

    assert done.code == ExitCode.LOG_AWAY
    assert str(unused_tcp_port) in done.err
    assert "secret" not in done.err
