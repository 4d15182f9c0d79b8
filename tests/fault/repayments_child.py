"""A process beside the test: repayments and the relay of their requests; it dies at a named step if told to.

Its one argument is JSON: see `Plan`. It stops on SIGTERM as a pod does.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from processors._http.answer import Answer
from processors._http.request import RequestDescription
from processors._http.sender import Gate, Sender
from processors.repayments.gateway import Gateway
from processors.repayments.processor import NAME, TABLE, Repayments, retry_message
from streams.database import Dialect, connect
from streams.log import Log, StreamSpec
from streams.logs import open_log
from streams.processor import Claim
from streams.relay import Relay, Tail
from streams.runtime import Runtime
from streams.sql import Row, Sql
from streams.telemetry import configure_logging
from tests.fault.child import LIMITS
from tests.support.asaas import TOKEN
from tests.support.engine import metrics


@dataclass(frozen=True)
class Plan:
    """Where it works, and where it dies: at the `nth` time that it reaches `step`."""

    database: str
    log: str
    stream: str
    gateway: str
    step: str = ""
    nth: int = 1


class Death:
    """Ends the process, without any farewell, at the step that was asked for."""

    def __init__(self, plan: Plan) -> None:
        self._step, self._left = plan.step, plan.nth

    def __call__(self, name: str) -> None:
        if name == self._step:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class DyingSender(Sender):
    """Reaches a step before and after each request."""

    def __init__(self, step: Callable[[str], None]) -> None:
        super().__init__()
        self._step = step

    async def send(self, what: RequestDescription, headers: Mapping[str, str], gate: Gate) -> Answer:
        self._step(f"before {what.method}")
        answer = await super().send(what, headers, gate)
        self._step(f"after {what.method}")
        return answer


class DyingSql:
    """Reaches a step after each statement."""

    def __init__(self, inner: Sql, step: Callable[[str], None]) -> None:
        self._inner, self._step = inner, step
        self.dialect: Dialect = inner.dialect

    async def fetch(self, text: str, *args: object) -> list[Row]:
        """See `streams.sql.Sql`."""
        rows = await self._inner.fetch(text, *args)
        self._step("written")
        return rows

    async def many(self, text: str, rows: Sequence[Sequence[object]]) -> None:
        """See `streams.sql.Sql`."""
        await self._inner.many(text, rows)
        self._step("written")

    def transaction(self) -> Any:
        """See `streams.sql.Sql`."""
        return self._inner.transaction()


class DyingRepayments(Repayments):
    """Reaches a step after each statement of its record."""

    def __init__(self, stream: str, gateway: Gateway, engine: AsyncEngine, step: Callable[[str], None]) -> None:
        super().__init__(stream, gateway, engine, LIMITS.database_away)
        self._step = step

    async def record(self, sql: Sql, done: Sequence[tuple[Claim, Mapping[str, Any]]]) -> None:
        await super().record(DyingSql(sql, self._step), done)


async def work(plan: Plan, log: Log) -> None:
    """Run both until SIGTERM."""
    await log.declare(StreamSpec(plan.stream))
    engine, death = connect(plan.database, "afluente-child"), Death(plan)
    sender = DyingSender(death)
    gateway = Gateway(sender, plan.gateway, TOKEN, 2.0, "afluente-child")
    processor = DyingRepayments(plan.stream, gateway, engine, death)
    runtime = Runtime(processor, log, engine, LIMITS, metrics(), death, lanes=processor.lanes(LIMITS.slots))
    relay = Relay(Tail(TABLE, plan.stream, NAME, retry_message), log, engine, LIMITS, metrics())
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with asyncio.TaskGroup() as tasks:
        for part in (runtime, relay):
            tasks.create_task(part.run(stop))
    await sender.close()
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
