"""The outbox as jobs of procrastinate: the second peer. The writer defers a job in the event's own transaction.

    python -m bench.peers.outbox_procrastinate

Up to 32 jobs at once, woken by LISTEN; each reads its event, posts it and writes the outcome.
"""

import asyncio
import os
from typing import Any

import procrastinate
from psycopg_pool import AsyncConnectionPool

from bench.peers.outbox_post import AT_ONCE, Post, posting

DSN = os.environ["BENCH_DSN"]
TASK, QUEUE = "deliver", "outbox"
READ = "SELECT payload::text, status FROM outbox_events WHERE id = %s"
WRITE = """
UPDATE outbox_events SET attempts = attempts + 1, last_error = %s, sent_at = CASE WHEN %s THEN now() END,
    status = CASE WHEN %s THEN 'sent' WHEN attempts + 1 >= 3 THEN 'failed' ELSE 'pending' END WHERE id = %s"""

app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=DSN, min_size=4, max_size=AT_ONCE + 2))


class Connections:
    """The pool and the session of the worker."""

    database: Any
    post: Post


class Failed(Exception):
    """To be retried."""


RETRIES = procrastinate.RetryStrategy(max_attempts=3, wait=5, retry_exceptions={Failed})


@app.task(queue=QUEUE, name=TASK, retry=RETRIES)  # type: ignore[untyped-decorator]  # installed for the bench only
async def deliver(event_id: int) -> None:
    """Post one event."""
    async with Connections.database.connection() as database:
        payload, status = await (await database.execute(READ, (event_id,))).fetchone()
    if status != "pending":
        return
    error = await Connections.post(event_id, payload)
    async with Connections.database.connection() as database:
        await database.execute(WRITE, (error, error is None, error is None, event_id))
    if error is not None:
        raise Failed(error)


async def main() -> None:
    """Work for ever."""
    pool = AsyncConnectionPool(DSN, min_size=8, max_size=8, kwargs={"autocommit": True}, open=False)
    async with app.open_async(), posting() as post, pool:
        Connections.database, Connections.post = pool, post
        await app.run_worker_async(queues=[QUEUE], concurrency=AT_ONCE, delete_jobs="successful")


if __name__ == "__main__":
    asyncio.run(main())
