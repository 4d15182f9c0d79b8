"""kill -9, five times in 2,000 mails: who got none, who got two, and how many repeats each kill caused.

The sink notes a mail the moment its final dot is read. What it has noted up to a kill came from the process that was
killed, so a recipient noted there and again later was repeated by that kill. Leases are short here, 3 s, so that the
relay brings the interrupted rows back soon; everything else is as in production.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import database, feeds, install, workers
from bench.database import Database
from bench.invented import address
from bench.places import WORK, say

KILL_AT = (200, 550, 900, 1250, 1600)
MAILS = 2000
LIMIT_SECONDS = 120.0
SHORT_LEASE = {
    "ACT_TIMEOUT_SECONDS": "2",
    "COMMIT_ALLOWANCE_SECONDS": "1",
    "CLOCK_STEP_SECONDS": "0",
    "LEASE_SECONDS": "3",
    "RELAY_POLL_SECONDS": "0.2",
}
_numbers = count(1001)


@dataclass(slots=True)
class Killed:
    """One run: `repeats` has the repeats of each kill, `doubted` the rows that say that they may have gone twice."""

    name: str
    delay_ms: float
    limit: int
    lost: int
    repeats: list[int]
    thrice: int
    doubted: int
    repeats_without_doubt: int
    details: dict[str, Any] = field(default_factory=dict)


async def run(limits: Sequence[int], delays: Sequence[float]) -> list[Killed]:
    """The product with each in-doubt limit at each delay, then FastStream at each delay."""
    found = [await _product(delay, limit) for delay in delays for limit in limits]
    return found + [await _peer(delay) for delay in delays]


async def _product(delay_ms: float, limit: int) -> Killed:
    async with database.fresh(next(_numbers)) as db:
        name = f"{db.name}-recipients"
        async with feeds.stream(name, 1) as stream:
            with TemporaryDirectory(dir=WORK) as folder, workers.slow_sink(delay_ms, Path(folder) / "mails") as port:
                settings = SHORT_LEASE | {
                    "DATABASE_URL": db.url,
                    "RECIPIENTS_STREAM": name,
                    "RECIPIENTS_PARTITIONS": "1",
                    "SMTP_PORT": str(port),
                    "IN_DOUBT_LIMIT": str(limit),
                }
                relay = workers.Product("outbox_relay", settings)
                try:
                    await asyncio.to_thread(workers.wait_until_ready, [relay])
                    await stream.publish(feeds.recipients(range(MAILS), 1))
                    lives = await _kill_again_and_again(
                        db, lambda: workers.Product("mailer", settings), Path(folder) / "mails"
                    )
                finally:
                    await asyncio.to_thread(relay.stop)
        return await _judge(f"in-doubt limit {limit}", delay_ms, limit, db, lives)


async def _peer(delay_ms: float) -> Killed:
    programs = str(install.peers())
    async with database.fresh(next(_numbers)) as db, feeds.queue(f"{db.name}-imports", programs) as queue:
        with TemporaryDirectory(dir=WORK) as folder, workers.slow_sink(delay_ms, Path(folder) / "mails") as port:
            await queue.publish(range(MAILS))
            lives = await _kill_again_and_again(
                db,
                lambda: workers.faststream(db.dsn, queue.name, port, workers=1, connections=16, same_mail=False),
                Path(folder) / "mails",
            )
        return await _judge("FastStream", delay_ms, 16, db, lives)


async def _kill_again_and_again(db: Database, start: Callable[[], workers.Worker], file: Path) -> list[list[str]]:
    """Kill the process at each mark, start it again at once; returns whom each of its lives has mailed."""
    db.seen = database.OLD_ROWS
    dice, marks, lives = random.Random(7), list(KILL_AT), list[list[str]]()
    noted = 0
    process = start()
    try:
        for mark in [*marks, MAILS]:
            await db.until_sent(mark, LIMIT_SECONDS, every=0.003)
            if mark == MAILS:
                await asyncio.sleep(1.0)  # what is repeated late counts too
            else:
                await asyncio.sleep(dice.uniform(0, 0.03))
                process.kill()
                await asyncio.sleep(0.2)  # what was in the sockets is read by now
            lines = (await asyncio.to_thread(file.read_text)).split()
            lives.append(lines[noted:])
            noted = len(lines)
            if mark != MAILS:
                process = start()
    finally:
        process.kill()
    return lives


async def _judge(name: str, delay_ms: float, limit: int, db: Database, lives: list[list[str]]) -> Killed:
    mails = Counter(one for life in lives for one in life)
    repeats = []
    for number, life in enumerate(lives[:-1]):
        later = {one for other in lives[number + 1 :] for one in other}
        repeats.append(sum(one in later for one in set(life)))
    doubted = {row["to"] for row in await db.look.fetch('SELECT "to" FROM email_dispatches WHERE doubts > 0')}
    twice = {one for one, times in mails.items() if times > 1}
    result = Killed(
        name,
        delay_ms,
        limit,
        lost=sum(mails[address(n)] == 0 for n in range(MAILS)),
        repeats=repeats,
        thrice=sum(times > 2 for times in mails.values()),
        doubted=len(doubted),
        repeats_without_doubt=len(twice - doubted) if name != "FastStream" else 0,
    )
    say(f"bench: {name} at {delay_ms:g} ms: lost {result.lost}, repeats per kill {repeats}, in doubt {len(doubted)}")
    return result
