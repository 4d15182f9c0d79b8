"""Memory of a mailer that works on a backlog of 200,000 recipients: does it stay where it was?

The backlog is there before the mailer starts. Its resident memory is read every half second while it works; compared
are the medians of the first and of the last quarter, each after the first ten seconds.
"""

import asyncio
import statistics
from itertools import count
from typing import Any

from bench import database, feeds, machine, workers
from bench.places import say

WARM_SECONDS = 10.0
AT_ONCE = 3333
"""What the splitter writes at once to one of three partitions, of a list of 10,000: it decides how large chunks are."""
_numbers = count(3001)


async def run(backlog: int, seconds: float) -> dict[str, Any]:
    """Let it work for so long, or to the end of the backlog."""
    async with database.fresh(next(_numbers)) as db:
        name = f"{db.name}-recipients"
        with workers.quick_sink() as port:
            async with feeds.stream(name, 1) as stream:
                for first in range(0, backlog, AT_ONCE):
                    await stream.publish(feeds.recipients(range(first, min(first + AT_ONCE, backlog)), 1))
                settings = {
                    "DATABASE_URL": db.url,
                    "RECIPIENTS_STREAM": name,
                    "RECIPIENTS_PARTITIONS": "1",
                    "SMTP_PORT": str(port),
                }
                mailer = workers.Product("mailer", settings)
                try:
                    await asyncio.to_thread(workers.wait_until_ready, [mailer])
                    found = await _watch(mailer, backlog, seconds)
                finally:
                    await asyncio.to_thread(mailer.stop)
    say(f"bench: memory {found['early_mb']:.1f} MB, later {found['late_mb']:.1f} MB, peak {found['peak_mb']:.1f} MB")
    return found


async def _watch(mailer: workers.Product, backlog: int, seconds: float) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    begun, series = loop.time(), list[tuple[float, float]]()
    while (now := loop.time() - begun) < seconds and mailer.mails() < backlog:
        series.append((round(now, 1), machine.resident_mb(mailer.pid)))
        await asyncio.sleep(0.5)
    warm = [mb for at, mb in series if at >= min(WARM_SECONDS, seconds / 4)] or [mb for _, mb in series]
    quarter = max(1, len(warm) // 4)
    return {
        "backlog": backlog,
        "mails": int(mailer.mails()),
        "seconds": round(loop.time() - begun, 1),
        "early_mb": statistics.median(warm[:quarter]),
        "late_mb": statistics.median(warm[-quarter:]),
        "peak_mb": machine.peak_mb(mailer.pid),
        "private_mb": machine.own_mb(mailer.pid),
        "series": [(at, round(mb, 1)) for at, mb in series],
    }
