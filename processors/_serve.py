"""How processors run: in one process, on one loop, with probes, until a signal; and in which order they stop."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from typing import Any, TypeVar

import structlog
from sqlalchemy import select

from models.tables import ProcessorOffset
from processors._compose import PROCESSORS, Runner, uses_database, uses_log
from processors._house import House, open_house
from processors._settings import Settings
from streams import telemetry
from streams.exit_codes import ExitCode
from streams.process import ProcessHealth, run_process, serve_probes

T = TypeVar("T")

log = structlog.get_logger(__name__)


async def run_processors(house: House, names: Sequence[str], stop: asyncio.Event) -> None:
    """Declare what these processors need and run them side by side until `stop`.

    When one ends with an error, the others finish what is in flight; then the errors are raised as a group.
    """
    for spec in dict.fromkeys(make(house.settings) for name in names for make in PROCESSORS[name].streams):
        await house.log.declare(spec)
    runners = {name: PROCESSORS[name].build(house) for name in names}
    results = await asyncio.gather(*(_run_one(name, r, stop) for name, r in runners.items()), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise BaseExceptionGroup("processors ended", errors)


async def _run_one(name: str, runner: Runner, stop: asyncio.Event) -> None:
    try:
        await runner.run(stop)
    except Exception:
        log.error("processor.ended", processor=name)  # noqa: TRY400 - `run_process` says why, once
        raise
    finally:
        stop.set()


# ---- readiness

LOOK_SECONDS = 2.0


class Readiness:
    """What keeps this process from its work, looked at every few seconds: a probe must not wait for a database."""

    def __init__(self) -> None:
        self._reasons = ["starting"]

    def check(self) -> bool | str:
        """The answer to a probe."""
        return "; ".join(self._reasons) or True

    async def watch(self, house: House, names: Sequence[str]) -> None:
        """Look again and again until cancelled."""
        while True:
            self._reasons = await unready(house, names)
            await asyncio.sleep(LOOK_SECONDS)


async def unready(house: House, names: Sequence[str]) -> list[str]:
    """Why this process cannot do its work at the moment; nothing when it can. The schema was looked at before."""
    reasons = ["the log is not connected"] if uses_log(names) and not house.log.connected else []
    reasons += [why for check in house.checks.values() if (why := check()) is not None]
    if not uses_database(names):
        return reasons
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            reasons += await _halted(house, names)
    except Exception as error:
        reasons.append(f"the database does not answer: {type(error).__name__}")
    return reasons


async def _halted(house: House, names: Sequence[str]) -> list[str]:
    row = ProcessorOffset.__table__.c  # type: ignore[attr-defined]
    query = select(row.processor, row.stream, row.partition).where(
        row.processor.in_(names), row.halted_reason.is_not(None)
    )
    async with house.engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        found = (await connection.execute(query)).all()
    return [f"{processor} is halted at {stream} {partition}" for processor, stream, partition in found]


# ---- the process


def serve(settings: Settings, names: Sequence[str]) -> ExitCode:
    """Run these processors as one process until a signal, and answer with what code it is to end."""
    telemetry.configure_logging(settings.log_level, settings.log_format)
    logging.getLogger("alembic").setLevel(logging.WARNING)  # it is only asked which revision the database has
    dsn = settings.sentry_dsn.get_secret_value() if settings.sentry_dsn else None
    telemetry.init_sentry(dsn, settings.sentry_environment, version("afluente"))
    metrics, health, readiness = telemetry.Metrics(), ProcessHealth(), Readiness()
    health.add_check("processors", readiness.check)

    async def main(stop: asyncio.Event) -> None:
        # said here and not before: from now on a signal is a stop, and not the end
        log.info("process.started", processors=list(names), probes_port=probes.port)
        async with AsyncExitStack() as stack:
            needs = {"database": uses_database(names), "needs_log": uses_log(names)}
            opening = stack.enter_async_context(open_house(settings, f"afluente {' '.join(names)}", metrics, **needs))
            house = await _unless(stop, opening)
            if house is not None:
                async with _meanwhile(readiness.watch(house, names)):
                    await run_processors(house, names, stop)

    with serve_probes(health, metrics.registry, settings.probes_host, settings.probes_port) as probes:
        return run_process(main, health=health, metrics=metrics, grace_seconds=settings.shutdown_grace_seconds)


async def _unless(stop: asyncio.Event, opening: Coroutine[Any, Any, T]) -> T | None:
    """The result, or None when the process is to stop before there is one: a start may wait long for its services."""
    work, stopping = asyncio.ensure_future(opening), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return await work if work.done() else None
    finally:
        stopping.cancel()
        work.cancel()
        await asyncio.wait({work})


@asynccontextmanager
async def _meanwhile(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
