"""The outbox in the test's own process: relay and sync as `_compose.py` builds them, a receiver, and ways to look."""

from typing import Any

from processors._demo.sink import Sink
from streams.testing import eventually
from tests.support.job import Job
from tests.support.receiver import Receiver
from tests.support.sites import Site

EVENT = "new_checkout.repayment_sync"
TOKEN = "invented-token"
SHORT = {
    "OUTBOX_RETRY_SECONDS": "0.2",
    "OUTBOX_TIMEOUT_SECONDS": "2",
    "COMMIT_ALLOWANCE_SECONDS": "1",
    "CLOCK_STEP_SECONDS": "1",
}
"""A claim lasts 5 s."""


class Outbox(Job):
    """See `Job`; `processors` are relay and sync, and the only service outside is the receiver."""

    def __init__(self, site: Site, receiver: Receiver, **changes: Any) -> None:
        processors = changes.pop("processors", ("outbox_relay", "sync"))
        ours = {"NEW_CHECKOUT_API_URL": receiver.url, "NEW_CHECKOUT_API_TOKEN": TOKEN, **SHORT}
        super().__init__(site, Sink(), processors=processors, **{**ours, **changes})

    # ---- writing

    async def insert(
        self, payload: str = '{"repayment": {"reference": "r"}}', name: str = EVENT, traceparent: str | None = None
    ) -> int:
        """One event, by the INSERT that any application may do; its id."""
        kind = "CAST(:payload AS jsonb)" if self.site.kind == "services" else ":payload"
        [row] = await self.sql(
            f"""INSERT INTO outbox_events (event_name, payload, traceparent)
            VALUES (:name, {kind}, :traceparent) RETURNING id""",
            name=name,
            payload=payload,
            traceparent=traceparent,
        )
        return int(row["id"])

    async def insert_many(self, count: int, name: str = EVENT) -> None:
        """So many, in one transaction."""
        payload = "json('{\"n\": 1}')" if self.site.kind == "embedded" else "'{\"n\": 1}'::jsonb"
        await self.sql(
            f"""WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count})
            INSERT INTO outbox_events (event_name, payload) SELECT '{name}', {payload} FROM n"""
        )

    # ---- looking

    async def event(self, event_id: int) -> dict[str, Any]:
        """Its row."""
        [row] = await self.sql("SELECT * FROM outbox_events WHERE id = :id", id=event_id)
        return row

    async def events(self, condition: str = "true") -> int:
        """How many meet an SQL condition."""
        [row] = await self.sql(f"SELECT count(*) AS n FROM outbox_events WHERE {condition}")
        return int(row["n"])

    async def is_now(self, event_id: int, status: str, timeout: float = 30.0) -> dict[str, Any]:
        """Wait until it has this status; its row."""

        async def has_status() -> dict[str, Any]:
            self.check()
            row = await self.event(event_id)
            assert row["status"] == status, row
            return row

        return await eventually(has_status, timeout)

    async def all_are(self, status: str, count: int, timeout: float = 60.0) -> None:
        """Wait until so many have this status, and no event another one."""

        async def have_it() -> None:
            self.check()
            assert (await self.events(f"status = '{status}'"), await self.events()) == (count, count)

        await eventually(have_it, timeout)
