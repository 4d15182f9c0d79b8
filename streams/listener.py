"""Hears NOTIFY for all relays of a process, on one connection: each that listens is woken by each commit of an event.

While there is no connection, polling serves; SQLite has no NOTIFY, so there is nothing to hear. Not here: what is due.
"""

import asyncio
from contextlib import suppress
from typing import Any

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from streams.database import dialect, driver_connection

CHANNEL = "afluente_relay"
"""What the database notifies when a row has become due by itself (docs/life-of-a-row.md)."""

AGAIN_SECONDS = 1.0

log = structlog.get_logger(__name__)


class Listener:
    """Listens while somebody wants to be woken."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._wakes: dict[asyncio.Event, str] = {}
        self._listening: asyncio.Task[None] | None = None
        self._said = False
        """That nothing is heard was said, once for each time that it is so."""

    def add(self, wake: asyncio.Event, about: str) -> None:
        """Set this event whenever a NOTIFY says `about`, or nothing, which is meant for all."""
        self._wakes[wake] = about
        if self._listening is None and dialect(self._engine) == "postgresql":
            self._listening = asyncio.create_task(self._listen())

    def remove(self, wake: asyncio.Event) -> None:
        """No longer; the last one ends the listening."""
        self._wakes.pop(wake, None)
        if not self._wakes and self._listening is not None:
            self._listening.cancel()
            self._listening = None

    def _notified(self, _connection: Any, _pid: int, _channel: str, about: str) -> None:
        for wake, mine in self._wakes.items():
            if about in ("", mine):
                wake.set()

    async def _listen(self) -> None:
        while True:
            try:
                async with driver_connection(self._engine) as connection:
                    await connection.add_listener(CHANNEL, self._notified)
                    self._said = False
                    try:
                        await _lost(connection)
                    finally:
                        with suppress(Exception):
                            await connection.remove_listener(CHANNEL, self._notified)
            except Exception as error:  # whatever it is: polling serves, and nobody would hear of a task that ended
                if not self._said:
                    log.warning("relay.not_listening", error=type(error).__name__)
                self._said = True
            await asyncio.sleep(AGAIN_SECONDS)


async def _lost(connection: Any) -> None:
    """Wait until the connection is gone; raises then, so that nobody takes it for one that can be put back."""
    gone = asyncio.Event()
    connection.add_termination_listener(lambda _: gone.set())
    if not connection.is_closed():
        await gone.wait()
    raise ConnectionResetError("the connection that listened is gone")
