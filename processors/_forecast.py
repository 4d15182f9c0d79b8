"""Which e-mails would follow if records were read now: for dry runs. It changes nothing.

A row decides about its mail, so who has a row, sent or failed or waiting, gets nothing more from a record.
"""

from collections.abc import Callable, Iterable

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from models.tables import EmailDispatch
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
