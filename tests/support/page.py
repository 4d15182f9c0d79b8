"""The operators' page in the test's own process, on a real socket; and rows to look at, of invented people."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self

from argon2 import PasswordHasher
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlmodel.ext.asyncio.session import AsyncSession

from models.tables import DeadLetter, EmailDispatch, ImportBatch, ImportSlice, OutboxEvent, ProcessorOffset
from processors._demo.sink import Sink
from processors.admin.office import open_office
from processors.admin.server import Admin
from streams.log import Log
from streams.testing import MovableClock
from tests.support.job import Looks
from tests.support.outbox import EVENT
from tests.support.sites import Site

PASSWORD = "uma senha inventada"
_HASH = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1).hash(PASSWORD)
"""A cheap one: what is tested is not how long it takes."""

SETTINGS = {
    "ADMIN_PORT": "0",
    "ADMIN_SECRET_KEY": "an invented key of more than thirty-two bytes",
    "ADMIN_USERS": f"ana:{_HASH}; bia:viewer:{_HASH}",
    "ADMIN_COOKIE_SECURE": "false",
}
"""ana changes things, bia looks."""

BATCH = "d332228b11f3f26877c00892394a2b17005e891e115ce9422ab5b87d14896227"


class AdminPage(Looks):
    """Serves while the block lasts. `clock` is moved by hand; the database has its own."""

    def __init__(
        self, site: Site, *, log: Log | None = None, engine: AsyncEngine | None = None, **changes: object
    ) -> None:
        """`log` and `engine` in place of the site's own, for the page alone."""
        super().__init__(site, Sink(), **{**SETTINGS, **changes})
        self._log_of_page, self._engine_of_page = log or self.log, engine or self.engine
        self.clock = MovableClock()
        self._stop = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        office = open_office(
            self.settings, self._engine_of_page, self._log_of_page, self.clock.time, self.clock.monotonic
        )
        admin = Admin(office)
        self.url = f"http://127.0.0.1:{admin.port}"
        self._serving = asyncio.create_task(admin.run(self._stop))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._stop.set()
        try:
            if self._serving is not None:
                await self._serving
        finally:
            await super().__aexit__(kind, error, at)

    async def add(self, *rows: Any) -> list[int]:
        """Write rows as some application did; their ids."""
        async with AsyncSession(self.engine, expire_on_commit=False) as session:
            session.add_all(rows)
            await session.commit()
        return [getattr(row, "id", 0) for row in rows]

    async def state(self, table: str, row_id: int) -> tuple[str, int]:
        """Status and attempts of one row."""
        [row] = await self.sql(f"SELECT status, attempts FROM {table} WHERE id = :id", id=row_id)
        return row["status"], row["attempts"]


# ---- rows


def event(status: str = "failed", **values: Any) -> OutboxEvent:
    """An event in this state; a failed one has used up its attempts."""
    now = datetime.now(UTC)
    defaults: dict[str, Any] = {
        "event_name": EVENT,
        "payload": {"event": "repayment", "repayment": {"reference": "rep-1", "value": "1200.00"}},
        "status": status,
        "attempts": {"failed": 3, "sent": 1}.get(status, 0),
        "claim_no": {"failed": 3, "sent": 1}.get(status, 0),
        "last_error": "HTTP 503: Service Unavailable" if status == "failed" else None,
        "sent_at": now if status == "sent" else None,
        # far ahead, so that a relay that runs in the test leaves it alone
        "next_attempt_at": now + timedelta(hours=1) if status == "pending" else None,
    }
    return OutboxEvent(**{**defaults, **values})


def in_flight(**values: Any) -> OutboxEvent:
    """An event that is being sent now."""
    until = datetime.now(UTC) + timedelta(minutes=5)
    return event("pending", attempts=1, claim_no=1, lease_until=until, next_attempt_at=None, **values)


def email(status: str | None = "failed", number: int = 1, **values: Any) -> EmailDispatch:
    """An e-mail in this state, to an invented person."""
    now = datetime.now(UTC)
    defaults: dict[str, Any] = {
        "to": f"pessoa{number}@example.com",
        "subject": "Inscrição recebida",
        "content": f"<p>Olá, Pessoa {number}! Recebemos a sua inscrição on-{number}.</p>",
        "mailable_type": "App\\Mail\\ImporteRegistrationMail",
        "meta": {"registration": 154_000_000 + number, "opp_id": 7301},
        "status": status,
        "attempts": {"failed": 3, "sent": 1}.get(status or "", 0),
        "claim_no": {"failed": 3, "sent": 1}.get(status or "", 0),
        "error_message": "451 4.7.1 Please try again later" if status == "failed" else None,
        "sent_at": now if status == "sent" else None,
        "next_attempt_at": now + timedelta(hours=1) if status == "pending" else None,
        "batch_id": BATCH,
        "batch_index": number,
        "created_at": now,
        "updated_at": now,
    }
    return EmailDispatch(**{**defaults, **values})


def letter_of(event_id: int, **values: Any) -> DeadLetter:
    """The dead letter of an event that has failed with its third claim."""
    defaults: dict[str, Any] = {
        "processor": "sync",
        "source_stream": "outbox",
        "source_partition": 0,
        "source_offset": 41,
        "table_name": "outbox_events",
        "row_id": event_id,
        "claim_no": 3,
        "reason": "attempts_used_up",
        "error": "HTTP 503: Service Unavailable",
        "attempts": 3,
    }
    return DeadLetter(**{**defaults, **values})


def rejected_item(index: int, **values: Any) -> DeadLetter:
    """The dead letter of a registration that could not be taken."""
    defaults: dict[str, Any] = {
        "processor": "splitter",
        "source_stream": "imports",
        "source_partition": 0,
        "source_offset": 7,
        "item_index": index,
        "batch_id": BATCH,
        "reason": "invalid_registration",
        "error": "agent_email is not a valid address (address_invalid)",
        "body": b'{"registration": 154000009, "opp_id": 7301, "agent_name": "Pessoa 9", "agent_email": "nenhum"}',
    }
    return DeadLetter(**{**defaults, **values})


def position(processor: str, stream: str, partition: int = 0, **values: Any) -> ProcessorOffset:
    """A processor that has read all but two records, and looked just now."""
    defaults: dict[str, Any] = {"next_offset": 1_240, "end_offset": 1_242, "seen_at": datetime.now(UTC)}
    row = {"processor": processor, "stream": stream, "partition": partition}
    return ProcessorOffset(**{**row, **defaults, **values})


def batch(total: int, **values: Any) -> Sequence[Any]:
    """An import list of which one slice came."""
    place: dict[str, Any] = {"stream": "imports", "partition": 0, "source_offset": 7, "batch_id": BATCH}
    return (
        ImportBatch(
            batch_id=BATCH, total=total, received=total, valid=total - 1, rejected=1, times_received=1, **values
        ),
        ImportSlice(**place, first_index=0, items=total, valid=total - 1, rejected=1),
    )
