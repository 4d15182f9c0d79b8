"""`afluente demo`: the whole path of a batch on this machine alone, against a mail server that misbehaves.

It needs no service and no root. The processors run in this process on a log and a database that are files; the mail
server is a process of its own, so that what it wrote down is independent of what the program believes. The batch is
published twice. What it all came to is counted in `count.py`.
"""

import asyncio
import json
import shutil
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from processors import _compose, _publish, _status
from processors._demo import batch, count
from processors._demo.count import Result
from processors._demo.display import Display
from processors._house import House, open_house
from processors._migrate import migrate
from processors._serve import run_processors
from processors._settings import Settings
from streams.errors import BadSettings, StreamsError
from streams.log import Partition
from streams.telemetry import Metrics, configure_logging

PATH = ("splitter", "mailer", "outbox_relay")
"""The processors that a batch passes, from the stream of imports to the mail server."""

LOOK_SECONDS = 0.2
PATIENCE_SECONDS = 60.0


class DemoStuck(StreamsError):
    """A delivery was not done in time."""


class DemoSettings(Settings):
    """Settings that nothing in the environment can change: the demo must not mail to a real server by accident."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the signature is the library's
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is given in the code."""
        return (init_settings,)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The last line, and every sentence that says why it must not be believed; none if all is well."""

    result: Result
    disagreements: list[str]


def demo(folder: Path | None, display: Display) -> Outcome:
    """Run it in `folder`, which must be new or empty; None: in a temporary one, removed at the end if all is well.

    Raises BadSettings for a folder that is not empty, and what ends a processor.
    """
    place = _place(folder)
    keep = True  # what goes wrong can only be seen in the files
    try:
        with (place / "processors.log").open("a", encoding="utf-8") as lines, display:
            configure_logging("INFO", "json", lines)
            result, disagreements = asyncio.run(_run(place, display))
        display.conclude(result)
        keep = folder is not None or bool(disagreements)
    finally:
        if keep:
            display.say(f"files: {place}")
        else:
            shutil.rmtree(place)
    return Outcome(result, disagreements)


def _place(folder: Path | None) -> Path:
    if folder is None:
        return Path(tempfile.mkdtemp(prefix="afluente-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise BadSettings(f"--folder {folder} is not empty; the demo counts all that is there, so it needs a new one")
    return folder.absolute()


async def _run(place: Path, display: Display) -> tuple[Result, list[str]]:
    sink_log = place / "mails.jsonl"
    async with _mail_server(sink_log) as port:
        settings = _settings(place, port)
        await migrate(settings.database_url.get_secret_value())
        async with _processors(settings) as house:
            body = batch.batch()
            await _deliver(house, body, 1, display)
            since = await _ends(house)
            mails_before = len(count.read_sink(sink_log))
            await _deliver(house, body, 2, display)
            redelivered = await count.read_first_messages(house.log, since)
            rows = await count.read_rows(house.engine)
    mails = count.read_sink(sink_log)
    result = count.result(rows, mails, mails_before, redelivered)
    return result, count.disagreements(result, rows, mails, batch.SIZE)


def _settings(place: Path, port: int) -> Settings:
    return DemoSettings(
        database_url=f"sqlite+aiosqlite:///{place / 'demo.db'}",
        log_url=f"embedded:///{place / 'log.db'}",
        smtp_host="127.0.0.1",
        smtp_port=port,
        smtp_security="none",
        mail_from="nao-responda@example.org",
        mail_from_name="Afluente (demonstração)",
        backoff_seconds="0.3,0.6",
        relay_poll_seconds=0.1,
        idle_look_seconds=0.5,
        act_timeout_seconds=5,
        commit_allowance_seconds=2,
        clock_step_seconds=1,
    )


@asynccontextmanager
async def _mail_server(log: Path) -> AsyncIterator[int]:
    """The mail server as a process of its own; yields its port."""
    arguments = ["-m", "processors._demo.sink", "--log", str(log), "--script", json.dumps(batch.REFUSALS)]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=PIPE)
    try:
        yield await _port(process)
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _port(process: Process) -> int:
    """It says `listening on 127.0.0.1:35000` when it does."""
    line = await process.stdout.readline() if process.stdout else b""
    _, _, port = line.decode().strip().rpartition(":")
    if not port.isdigit():
        raise StreamsError("the demo's mail server did not start")
    return int(port)


@asynccontextmanager
async def _processors(settings: Settings) -> AsyncIterator[House]:
    """The processors of the path in this process; at the end of the block they have recorded what was in flight.

    What ends one of them early ends the block at once.
    """
    stop = asyncio.Event()
    async with open_house(settings, "afluente demo", Metrics()) as house, asyncio.TaskGroup() as tasks:
        tasks.create_task(run_processors(house, PATH, stop))
        yield house
        stop.set()


# ---- deliveries


async def _deliver(house: House, body: bytes, times: int, display: Display) -> None:
    """Publish the batch and wait until nothing of it waits any more."""
    await _publish.publish(house.log, _compose.imports_spec(house.settings), body)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                status = await _status.status(house.engine, house.log, _compose.readers(house.settings), 1)
                display.show(times, status)
                if _is_done(status, times):
                    return
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError:
        raise DemoStuck(f"delivery {times} was not done after {PATIENCE_SECONDS:.0f} s") from None


def _is_done(status: _status.Status, times: int) -> bool:
    """Everything is read to its end, and every row of the batch has its outcome."""
    read = all(p.lag_records == 0 for p in status.processors)
    return read and any(b.times_received == times and b.complete for b in status.batches)


async def _ends(house: House) -> list[tuple[Partition, int]]:
    partitions = await house.log.partitions(house.settings.recipients_stream)
    return [(partition, (await house.log.bounds(partition)).next) for partition in partitions]
