"""Deployment `outbox_relay`: what is due in the tables goes to the streams whose readers look at the rows.

Each table has a tail of its own (`streams.relay`). Which tables there are, and what a message about a row is, says the
one who puts the processors together, for processors do not know each other.
"""

import asyncio
from collections.abc import Sequence

from streams.relay import Relay

NAME = "outbox_relay"


class OutboxRelay:
    """Runs the relays of all tails in one process, side by side."""

    def __init__(self, relays: Sequence[Relay]) -> None:
        self._relays = relays

    async def run(self, stop: asyncio.Event) -> None:
        """Relay until `stop`."""
        async with asyncio.TaskGroup() as tasks:
            for relay in self._relays:
                tasks.create_task(relay.run(stop))
