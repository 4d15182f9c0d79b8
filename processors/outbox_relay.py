"""Deployment `outbox_relay`: what is due in the tables goes to the streams whose readers look at the rows.

Each table has a tail of its own (`streams.relay`). Which tables there are, and what a message about a row is, says the
one who puts the processors together, for processors do not know each other. It also deletes old events that are sent.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from streams.relay import Relay
from streams.sql import Database, Sql, later

NAME = "outbox_relay"

PRUNE_ROWS = 1000
"""Deleted at once: a short transaction, so that nobody waits for it."""

PRUNE_PAUSE_SECONDS = 0.1
PRUNE_EVERY_SECONDS = 600.0

log = structlog.get_logger(__name__)


class Pruner:
    """Deletes events that were sent longer than so many days ago. Two at once do not wait for each other."""

    def __init__(self, engine: AsyncEngine, days: float, away_seconds: float) -> None:
        self._database, self._days = Database(engine, away_seconds), days

    async def run(self, stop: asyncio.Event) -> None:
        """Prune now and every few minutes, until `stop`."""
        while not stop.is_set():
            more = await self._database.patiently(self.prune) == PRUNE_ROWS
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), PRUNE_PAUSE_SECONDS if more else PRUNE_EVERY_SECONDS)

    async def prune(self, sql: Sql) -> int:
        """Delete a chunk; how many there were."""
        limit = later(sql.dialect, str(-self._days * 86400))
        skip = "FOR UPDATE SKIP LOCKED" if sql.dialect == "postgresql" else ""
        # created_at only leads the index: what was sent before then was written before then
        rows = await sql.fetch(
            f"""DELETE FROM outbox_events WHERE id IN (
                SELECT id FROM outbox_events WHERE status = 'sent' AND created_at < {limit} AND sent_at < {limit}
                ORDER BY created_at LIMIT {PRUNE_ROWS} {skip})
            RETURNING id"""
        )
        if rows:
            log.info("outbox.pruned", rows=len(rows))
        return len(rows)


class OutboxRelay:
    """Runs the relays of all tails in one process, side by side, and the pruner where old rows are to go."""

    def __init__(self, relays: Sequence[Relay], pruner: Pruner | None = None) -> None:
        self._parts: list[Relay | Pruner] = [*relays]
        if pruner is not None:
            self._parts.append(pruner)

    async def run(self, stop: asyncio.Event) -> None:
        """Relay until `stop`."""
        async with asyncio.TaskGroup() as tasks:
            for part in self._parts:
                tasks.create_task(part.run(stop))
