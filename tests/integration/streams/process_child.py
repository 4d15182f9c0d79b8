"""A process for test_process.py: probes on a free port, printed first, and a main that behaves as its argument says."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable

from streams.errors import LogRefused
from streams.process import ProcessHealth, run_process, serve_probes
from streams.telemetry import Metrics, configure_logging


async def idles(stop: asyncio.Event) -> None:
    """Nothing to do until told to stop."""
    await stop.wait()


async def finishes(stop: asyncio.Event) -> None:
    """What is in flight takes a moment after the signal."""
    await stop.wait()
    await asyncio.sleep(0.3)
    sys.stdout.write("finished\n")


async def lingers(stop: asyncio.Event) -> None:
    """What is in flight takes too long, but can be cancelled."""
    sys.stdout.write("lingering\n")
    sys.stdout.flush()
    await stop.wait()
    try:
        await asyncio.sleep(600)
    finally:
        sys.stdout.write("cancelled\n")


async def hangs(_stop: asyncio.Event) -> None:
    """The loop does not turn any more."""
    sys.stdout.write("hanging\n")
    sys.stdout.flush()
    while True:
        time.sleep(600)  # noqa: ASYNC251 - that is the fault


async def refused(_stop: asyncio.Event) -> None:
    """An error of ours with an exit code of its own, as a task group raises it."""
    raise BaseExceptionGroup("processors ended", [LogRefused("the broker refuses the password")])


async def crashes(_stop: asyncio.Event) -> None:
    """A mistake in the code."""
    raise KeyError("x")


async def returns(_stop: asyncio.Event) -> None:
    """Done by itself."""


MAINS: dict[str, Callable[[asyncio.Event], Awaitable[None]]] = {
    main.__name__: main for main in (idles, finishes, lingers, hangs, refused, crashes, returns)
}


def main(name: str, grace_seconds: float) -> int:
    """Run one of the mains."""
    configure_logging("INFO", "json")
    health, metrics = ProcessHealth(stuck_after=1.5), Metrics()
    with serve_probes(health, metrics.registry) as probes:
        sys.stdout.write(f"{probes.port}\n")
        sys.stdout.flush()
        return run_process(MAINS[name], health=health, metrics=metrics, grace_seconds=grace_seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
