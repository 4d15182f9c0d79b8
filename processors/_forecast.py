"""What would follow if records were read now: for dry runs. It changes nothing.

A row decides about its mail, so who has a row, sent or failed or waiting, gets nothing more from a record. A record
that only points at a row brings about what the row waits for: nothing, unless it is pending and due.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from models.tables import EmailDispatch
from models.times import utc_now
from streams.errors import Reject, Undecodable
from streams.message import Message, decode

NewKeys = Callable[[Message], list[str]]
"""The keys of the e-mails that a record makes; see `_compose.Entry`."""

LOOK_UP = 500


class Forecast:
    """Counts record after record: `records` in all, `dead` that cannot be taken, `mails` that nobody has a row for."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self._new: set[str] = set()
        self.records = self.dead = 0

    @property
    def mails(self) -> int:
        """Each recipient once, in however many records."""
        return len(self._new)

    async def add(self, new_keys: NewKeys, records: Iterable[bytes]) -> None:
        """Count these records of a processor's stream."""
        keys: list[str] = []
        for record in records:
            self.records += 1
            try:
                keys += new_keys(decode(record))
            except (Undecodable, Reject):
                self.dead += 1
        for start in range(0, len(keys), LOOK_UP):
            part = set(keys[start : start + LOOK_UP])
            self._new |= part - await self._with_row(part)

    async def _with_row(self, keys: set[str]) -> set[str]:
        column = EmailDispatch.__table__.c.idempotency_key  # type: ignore[attr-defined]
        return set((await self._connection.scalars(select(column).where(column.in_(keys)))).all())


@dataclass(frozen=True, slots=True)
class Pointer:
    """What the records of a stream point at: the table, and the id that a message names. `row_id` raises Reject."""

    table: Any
    row_id: Callable[[Message], int]


class RowForecast:
    """Counts record after record: `records` in all, `dead` that cannot be taken, rows that are `due` now."""

    def __init__(self, connection: AsyncConnection, pointer: Pointer) -> None:
        self._connection, self._pointer = connection, pointer
        self._due: set[int] = set()
        self.records = self.dead = 0

    @property
    def due(self) -> int:
        """Each row once, however many records point at it."""
        return len(self._due)

    async def add(self, records: Iterable[bytes]) -> None:
        """Count these records."""
        ids: list[int] = []
        for record in records:
            self.records += 1
            try:
                ids.append(self._pointer.row_id(decode(record)))
            except (Undecodable, Reject):
                self.dead += 1
        for start in range(0, len(ids), LOOK_UP):
            self._due |= await self._due_among(set(ids[start : start + LOOK_UP]))

    async def _due_among(self, ids: set[int]) -> set[int]:
        c = self._pointer.table.__table__.c
        times = [or_(column.is_(None), column <= utc_now()) for column in (c.next_attempt_at, c.lease_until)]
        rows = select(c.id).where(c.id.in_(ids), c.status == "pending", *times)
        return set((await self._connection.scalars(rows)).all())
