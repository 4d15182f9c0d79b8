"""A process beside the test: splitter, a mailer that writes into a file, and relay; it dies at a named step if told to.

Its one argument is JSON: see `Plan`. It stops on SIGTERM as a pod does.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from processors.mailer.processor import TABLE
from processors.splitter.processor import Splitter
from streams.database import connect
from streams.errors import Retry
from streams.log import Log, StreamSpec
from streams.logs import open_log
from streams.message import Message
from streams.processor import Claim, Gate
from streams.relay import Relay, Tail
from streams.runtime import Runtime
from streams.sql import Row, Sql
from streams.telemetry import configure_logging
from streams.transforms import TransformRuntime
from tests.support.engine import LIMITS as USUAL
from tests.support.engine import RETRY, Scripted, metrics

LIMITS = replace(
    USUAL, act_timeout=3.0, reply_timeout=1.0, commit_allowance=1.0, lease=5.0, visibility=1.0, relay_poll=0.1
)


@dataclass(frozen=True)
class Plan:
    """Where it works, and where it dies: at the `nth` time that `part` reaches `step`."""

    database: str
    log: str
    imports: str
    recipients: str
    mails: str
    part: str = ""
    step: str = ""
    nth: int = 1


class FileMailer(Scripted):
    """Sends by one line in a file, which outlives the process as a mail does. One in four fails at the first try."""

    def __init__(self, stream: str, mails: Path) -> None:
        super().__init__(stream)
        self._mails = mails

    async def act(self, claim: Claim, gate: Gate) -> Mapping[str, object]:
        key = str(claim.key)
        if claim.attempts == 1 and key[0] in "048c":
            raise Retry("451 later")
        await gate.wait()
        gate.check()
        with self._mails.open("ab", buffering=0) as file:
            file.write(f"{key}\n".encode())
        return {}


class Death:
    """Counts the steps of one part and ends the process, without any farewell, at the one that was asked for."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._left = plan.nth
        self.armed = plan.part != "relay"

    def of(self, part: str) -> Callable[[str], None]:
        """The hook for one part."""
        return lambda name: self._step(part, name)

    def _step(self, part: str, name: str) -> None:
        if not self.armed or (part, name) != (self._plan.part, self._plan.step):
            return
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def arm_when_rows_are_due(relay: Relay, death: Death) -> None:
    """Most turns of a relay find nothing; die in one that has reserved something."""
    reserve = relay._due.reserve

    async def noting(sql: Sql, limit: int) -> list[Row]:
        rows = await reserve(sql, limit)
        death.armed = death.armed or bool(rows)
        return rows

    relay._due.reserve = noting  # type: ignore[method-assign]


def retry(row: Row) -> Message:
    """The hint at a row."""
    return Message(str(row["id"]), RETRY, 1, row["attempts"] + 1, b"{}")


async def work(plan: Plan, log: Log) -> None:
    """Run the three until SIGTERM."""
    await log.declare(StreamSpec(plan.imports))
    await log.declare(StreamSpec(plan.recipients, 2))
    engine = connect(plan.database, "afluente-child")
    death = Death(plan)
    splitter = TransformRuntime(
        Splitter(plan.imports, plan.recipients), log, engine, LIMITS, metrics(), death.of("splitter")
    )
    mailer = Runtime(FileMailer(plan.recipients, Path(plan.mails)), log, engine, LIMITS, metrics(), death.of("mailer"))
    tail = Tail(TABLE, plan.recipients, "mailer", retry)
    relay = Relay(tail, log, engine, LIMITS, metrics(), step=death.of("relay"))
    arm_when_rows_are_due(relay, death)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with asyncio.TaskGroup() as tasks:
        for part in (splitter, mailer, relay):
            tasks.create_task(part.run(stop))
    await engine.dispose()


async def main() -> None:
    """Open the log, work, close it."""
    configure_logging("WARNING", "json")
    plan = Plan(**json.loads(sys.argv[1]))
    log = open_log(plan.log)
    await log.open()
    await work(plan, log)
    await log.close()


if __name__ == "__main__":
    asyncio.run(main())
