"""POST one event as the peers of the outbox do: aiohttp, kept connections, at most 32 at once."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp

AT_ONCE = 32
Post = Callable[[int, str], Awaitable[str | None]]
"""Event id and payload; None when it was accepted, else the error."""


@asynccontextmanager
async def posting() -> AsyncIterator[Post]:
    """A function that posts, for the time of the block."""
    url = os.environ["BENCH_URL"]
    headers = {"Authorization": f"Bearer {os.environ['BENCH_TOKEN']}", "Content-Type": "application/json"}
    connector, timeout = aiohttp.TCPConnector(limit=AT_ONCE), aiohttp.ClientTimeout(10)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:

        async def post(event: int, payload: str) -> str | None:
            try:
                named = {"X-Event-Id": str(event)}
                async with session.post(url, data=payload.encode(), headers=named) as answer:
                    await answer.read()
                    return None if answer.status < 300 else f"HTTP {answer.status}"
            except (aiohttp.ClientError, TimeoutError) as error:
                return str(error)[:500]

        yield post
