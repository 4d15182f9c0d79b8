"""The outbox as most would write it: a poller. The first peer of relay and sync.

    python -m bench.peers.outbox_poller

Every 0.1 s it locks up to 100 due rows with SKIP LOCKED, posts them all at once over kept connections (aiohttp, at most
32), writes the outcomes, commits. The rows are locked while it posts, so a kill repeats up to 100.
"""

import asyncio
import os
from typing import Any

import asyncpg

from bench.peers.outbox_post import Post, posting

TAKE = """
SELECT id, payload::text AS payload FROM outbox_events
WHERE status = 'pending' AND (next_attempt_at IS NULL OR next_attempt_at <= now())
ORDER BY id FOR UPDATE SKIP LOCKED LIMIT 100"""
SENT = """
UPDATE outbox_events SET status = 'sent', attempts = attempts + 1, sent_at = now(), last_error = NULL
WHERE id = ANY($1::bigint[])"""
FAILED = """
UPDATE outbox_events SET attempts = attempts + 1, last_error = $2, next_attempt_at = now() + interval '5 s',
    status = CASE WHEN attempts + 1 >= 3 THEN 'failed' ELSE 'pending' END WHERE id = $1"""


async def turn(database: Any, post: Post) -> int:
    """One batch; how many there were."""
    async with database.transaction():
        rows = await database.fetch(TAKE)
        errors = await asyncio.gather(*(post(row["id"], row["payload"]) for row in rows))
        sent = [row["id"] for row, error in zip(rows, errors, strict=True) if error is None]
        if sent:
            await database.execute(SENT, sent)
        for row, error in zip(rows, errors, strict=True):
            if error is not None:
                await database.execute(FAILED, row["id"], error)
    return len(rows)


async def main() -> None:
    """Poll for ever."""
    database = await asyncpg.connect(os.environ["BENCH_DSN"])
    async with posting() as post:
        while True:
            if await turn(database, post) < 100:
                await asyncio.sleep(0.1)


if __name__ == "__main__":
    asyncio.run(main())
