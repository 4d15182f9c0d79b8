"""A process dies at any point of a repayment and is started again: one charge, one repayment, one event.

Embedded with SQLite, and on RabbitMQ with PostgreSQL. Times are short: a claim lasts 5 s. The deaths of one test happen
side by side, each in a place of its own with its own gateway.
"""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from models.tables import Payment
from processors._repayment_request import TYPE, VERSION
from streams.database import connect
from streams.log import StreamSpec
from streams.logs import open_log
from streams.message import Message
from streams.testing import eventually
from tests.conftest import ROOT, Services
from tests.fault.repayments_child import Plan
from tests.support.asaas import CUSTOMER, Asaas
from tests.support.broker import Management, new_name
from tests.support.databases import Migrated, query
from tests.support.repayments import a_request, due

AT_ONCE = 4
"""So many deaths are tried side by side: most of the time goes by waiting for leases."""

DEATHS = [
    ("planned", 1),
    ("claimed", 1),
    ("after GET", 1),
    ("before POST", 1),
    ("after POST", 1),
    ("after GET", 3),
    ("before DELETE", 1),
    ("after DELETE", 1),
    ("acted", 1),
    ("written", 1),
    ("written", 4),
    ("written", 8),
    ("recorded", 1),
]
"""Steps of the engine, requests to the gateway, and statements of the transaction, of which there are eight."""


@dataclass(frozen=True)
class Place:
    """Where one death happens."""

    plan: Plan
    engine: AsyncEngine
    asaas: Asaas

    async def start(self, plan: Plan) -> asyncio.subprocess.Process:
        """A process."""
        command = [sys.executable, "-m", "tests.fault.repayments_child", json.dumps(asdict(plan))]
        return await asyncio.create_subprocess_exec(*command, cwd=ROOT)

    async def dies(self, step: str, nth: int) -> None:
        """Start it and see it die where it should."""
        process = await self.start(replace(self.plan, step=step, nth=nth))
        async with asyncio.timeout(40):
            assert await process.wait() == -signal.SIGKILL

    async def ends(self) -> None:
        """Start it again, wait until the request is done, and stop it as a pod is stopped."""
        process = await self.start(self.plan)
        try:
            await eventually(self.is_done, timeout=40)
        finally:
            if process.returncode is None:
                process.terminate()
            async with asyncio.timeout(20):
                returned = await process.wait()
        assert returned in {0, -signal.SIGTERM}  # the latter if all was done before it had begun to listen

    async def is_done(self) -> None:
        """The request is sent."""
        rows = await query(self.engine, "SELECT * FROM repayment_requests")
        assert [row["status"] for row in rows] == ["sent"], rows

    async def check(self) -> None:
        """One of each, and the original is cancelled."""
        made = [p for p in self.asaas.payments.values() if p["externalReference"] == "rep-1"]
        assert (len(made), self.asaas.made("POST")) == (2, 1)
        assert (len(self.asaas.live("rep-1")), len(self.asaas.live("old"))) == (2, 0)
        for table, count in {"repayments": 1, "outbox_events": 1, "payments": 2, "installments": 2}.items():
            [row] = await query(self.engine, f"SELECT count(*) AS n FROM {table}")
            assert row["n"] == count, table
        [original] = await query(self.engine, "SELECT status FROM payments WHERE reference = 'old'")
        assert original["status"] == "renegotiated"
        assert await query(self.engine, "SELECT * FROM dead_letters") == []


@asynccontextmanager
async def a_place(kind: str, folder: Path, migrated: Migrated, services: Services | None) -> AsyncIterator[Place]:
    """A database with an original payment, its charge at a gateway, and the request in a log."""
    copy = migrated.copy("postgresql" if services else "sqlite", folder)
    async with AsyncExitStack() as stack:
        url = await asyncio.to_thread(copy.__enter__)
        stack.push_async_callback(asyncio.to_thread, copy.__exit__, None, None, None)
        asaas = await stack.enter_async_context(Asaas())
        log_url = services.log_url if services else f"embedded:///{folder / 'log.db'}"
        plan = Plan(url, log_url, f"{new_name()}-requests", asaas.url)
        if services:
            stack.push_async_callback(Management(services).delete, plan.stream)
        engine = connect(url, "test")
        stack.push_async_callback(engine.dispose)
        await publish_request(plan, await an_original(engine, asaas.charge()[0]))
        yield Place(plan, engine, asaas)


async def an_original(engine: AsyncEngine, charge: str) -> int:
    """A payment that is open; its id."""
    payment = Payment(
        reference="old", customer=CUSTOMER, billing_type="BOLETO", value=Decimal("100.00"), due_date=due(3),
        gateway_id=charge,
    )  # fmt: skip
    async with engine.begin() as connection:
        values = payment.model_dump(exclude_none=True)
        table = Payment.__table__  # type: ignore[attr-defined]
        return int((await connection.scalars(table.insert().values(**values).returning(table.c.id))).one())


async def publish_request(plan: Plan, original: int) -> None:
    """As the page does."""
    request = a_request(parts=2, original_payment=original)
    log = open_log(plan.log)
    await log.open()
    await log.declare(StreamSpec(plan.stream))
    [partition] = await log.partitions(plan.stream)
    publisher = await log.publisher(partition)
    await publisher.publish([Message(request.reference, TYPE, VERSION, 1, request.to_json()).encode()])
    await publisher.close()
    await log.close()


@pytest.mark.parametrize("kind", ["embedded", "services"])
@pytest.mark.timeout(300)
async def test_one_charge_and_one_event_when_a_process_dies_at_any_point(
    kind: str, tmp_path: Path, migrated: Migrated, request: pytest.FixtureRequest
) -> None:
    """Before and after each request to the gateway, and between any two statements of the transaction."""
    services = request.getfixturevalue("services") if kind == "services" else None
    turn = asyncio.Semaphore(AT_ONCE)
    problems: list[str] = []

    async def one(step: str, nth: int) -> None:
        folder = folders[step, nth]
        async with turn, a_place(kind, folder, migrated, services) as place:
            try:
                await place.dies(step, nth)
                await place.ends()
                await place.check()
            except (AssertionError, TimeoutError) as error:
                problems.append(f"dies at {step} ({nth}): {error!r}")

    folders = {death: tmp_path / f"{death[0].replace(' ', '-')}-{death[1]}" for death in DEATHS}
    for folder in folders.values():
        folder.mkdir()
    # the first alone: it makes the migrated database that the others copy
    first, *others = DEATHS
    await one(*first)
    await asyncio.gather(*(one(*each) for each in others))
    assert not problems, "\n".join(problems)
