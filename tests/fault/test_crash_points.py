"""A process dies between any two steps of a turn and is started again: nothing is lost, and the rows say who got two.

One process runs splitter, mailer and relay (`child.py`), embedded with SQLite and on RabbitMQ with PostgreSQL.
Times are short: a claim lasts 5 s. The deaths of one test happen side by side, each in a place of its own.
"""

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from streams.database import connect
from streams.log import Log, StreamSpec
from streams.logs import open_log
from streams.message import Message, decode
from streams.testing import NotingOwner, collect, eventually
from tests.conftest import ROOT, Services
from tests.fault.child import LIMITS, Plan
from tests.support.broker import Management, new_name
from tests.support.databases import Migrated, query
from tests.support.engine import RETRY

BATCHES, PEOPLE = 3, 12
AT_ONCE = 5
"""So many deaths are tried side by side: most of the time goes by waiting for leases."""

DEATHS = {
    "splitter": [("taken", 1), ("transformed", 1), ("published", 1), ("recorded", 1)],
    "mailer": [
        ("taken", 2),
        ("decoded", 2),
        ("planned", 1),
        ("claimed", 4),
        ("acted", 1),
        ("acted", 9),
        ("recording", 2),
        ("recorded", 1),
        ("recorded", 5),
    ],
    "relay": [("reserved", 1), ("published", 1), ("published", 2)],
}


def a_batch(number: int) -> bytes:
    """A list of people, one of whom cannot be mailed."""
    people: list[dict[str, Any]] = [
        {
            "registration": number * 100 + n,
            "opp_id": 7,
            "opp_name": "Edital",
            "number": f"on-{n}",
            "agent_name": "Ana",
            "agent_email": f"u{n}@example.com" if n else "nobody",
        }
        for n in range(PEOPLE + 1)
    ]
    return Message("", "import", 1, 1, json.dumps(people).encode()).encode()


@dataclass(frozen=True)
class Place:
    """Where one death happens."""

    plan: Plan
    engine: AsyncEngine

    @property
    def mails(self) -> Counter[str]:
        """Who got how many."""
        path = Path(self.plan.mails)
        return Counter(path.read_text().split()) if path.exists() else Counter()

    async def start(self, plan: Plan) -> asyncio.subprocess.Process:
        """A process."""
        command = [sys.executable, "-m", "tests.fault.child", json.dumps(asdict(plan))]
        return await asyncio.create_subprocess_exec(*command, cwd=ROOT)

    async def dies(self) -> None:
        """Start it and see it die where it should."""
        process = await self.start(self.plan)
        async with asyncio.timeout(40):
            assert await process.wait() == -signal.SIGKILL

    async def ends(self) -> None:
        """Start it again, wait until all is done, and stop it as a pod is stopped."""
        process = await self.start(replace(self.plan, part="", step=""))
        try:
            await eventually(self.all_is_done, timeout=40)
        finally:
            if process.returncode is None:
                process.terminate()
            async with asyncio.timeout(20):
                returned = await process.wait()
        assert returned == 0

    async def all_is_done(self) -> None:
        """Every row is sent, and every position is at the end of what there is."""
        rows = await query(self.engine, "SELECT status, count(*) AS n FROM email_dispatches GROUP BY status")
        assert {row["status"]: row["n"] for row in rows} == {"sent": BATCHES * PEOPLE}
        positions = await query(self.engine, "SELECT * FROM processor_offsets")
        assert len(positions) == 3
        assert all(p["next_offset"] == p["end_offset"] and p["halted_reason"] is None for p in positions), positions

    async def published(self) -> Counter[str]:
        """The first messages in `recipients`, by key."""
        log = open_log(self.plan.log)
        await log.open()
        try:
            return Counter([m.id for m in await _messages(log, self.plan.recipients) if m.type != RETRY])
        finally:
            await log.close()

    async def check(self) -> None:
        """One outcome for each, nothing lost, repeats bounded and listed, nothing twice in the stream."""
        rows = await query(self.engine, "SELECT * FROM email_dispatches")
        by_key = {row["idempotency_key"]: row for row in rows}
        assert set(self.mails) == set(by_key)
        repeated = {key: times - 1 for key, times in self.mails.items() if times > 1}
        assert sum(repeated.values()) <= LIMITS.in_doubt, repeated
        assert all(by_key[key]["doubts"] >= times for key, times in repeated.items()), repeated
        assert sum(row["doubts"] > 0 for row in rows) <= LIMITS.slots
        assert all(row["lease_until"] is None and row["next_attempt_at"] is None for row in rows)
        assert await self.published() == dict.fromkeys(by_key, 1)
        batches = await query(self.engine, "SELECT * FROM import_batches")
        assert {(b["total"], b["valid"], b["rejected"], b["times_received"]) for b in batches} == {
            (PEOPLE + 1, PEOPLE, 1, 1)
        }
        letters = await query(self.engine, "SELECT reason FROM dead_letters")
        assert [letter["reason"] for letter in letters] == ["invalid_registration"] * BATCHES


async def _messages(log: Log, stream: str) -> list[Message]:
    found: list[Message] = []
    for partition in await log.partitions(stream):
        count = (await log.bounds(partition)).next
        subscription = await log.subscribe(partition, new_name(), NotingOwner())
        found += [decode(record.data) for record in await collect(subscription, count)]
        await subscription.close()
    return found


@asynccontextmanager
async def a_place(kind: str, folder: Path, migrated: Migrated, services: Services | None) -> AsyncIterator[Place]:
    """A database, and three batches in a log."""
    copy = migrated.copy("postgresql" if services else "sqlite", folder)
    async with AsyncExitStack() as stack:
        url = await asyncio.to_thread(copy.__enter__)
        stack.push_async_callback(asyncio.to_thread, copy.__exit__, None, None, None)
        name = new_name()
        log_url = services.log_url if services else f"embedded:///{folder / 'log.db'}"
        plan = Plan(url, log_url, f"{name}-imports", f"{name}-recipients", str(folder / "mails"))
        if services:
            for stream in (plan.imports, plan.recipients):
                stack.push_async_callback(Management(services).delete, stream)
        await publish_batches(plan)
        engine = connect(url, "test")
        stack.push_async_callback(engine.dispose)
        yield Place(plan, engine)


async def publish_batches(plan: Plan) -> None:
    """As any publisher does."""
    log = open_log(plan.log)
    await log.open()
    await log.declare(StreamSpec(plan.imports))
    [partition] = await log.partitions(plan.imports)
    publisher = await log.publisher(partition)
    await publisher.publish([a_batch(number) for number in range(BATCHES)])
    await publisher.close()
    await log.close()


async def death(place: Place, part: str, step: str, nth: int) -> None:
    """Die there, start again, look."""
    dying = Place(replace(place.plan, part=part, step=step, nth=nth), place.engine)
    await dying.dies()
    await dying.ends()
    await dying.check()


@pytest.mark.parametrize("part", list(DEATHS))
@pytest.mark.parametrize("kind", ["embedded", "services"])
async def test_nothing_is_lost_when_a_process_dies_between_two_steps(
    kind: str, part: str, tmp_path: Path, migrated: Migrated, request: pytest.FixtureRequest
) -> None:
    """At every named step: one outcome for everybody, repeats at most the in-doubt limit and listed, no other trace."""
    services = request.getfixturevalue("services") if kind == "services" else None
    turn = asyncio.Semaphore(AT_ONCE)
    problems: list[str] = []

    async def one(step: str, nth: int) -> None:
        folder = folders[step, nth]
        async with turn, a_place(kind, folder, migrated, services) as place:
            try:
                await death(place, part, step, nth)
            except (AssertionError, TimeoutError) as error:
                problems.append(f"{part} dies at {step} ({nth}): {error!r}")

    folders = {death: tmp_path / f"{death[0]}-{death[1]}" for death in DEATHS[part]}
    for folder in folders.values():
        folder.mkdir()
    # the first alone: it makes the migrated database that the others copy
    first, *others = DEATHS[part]
    await one(*first)
    await asyncio.gather(*(one(*each) for each in others))
    assert not problems, "\n".join(problems)
