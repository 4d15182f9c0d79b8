"""Times of the tables: aware UTC in Python, on every database. Nothing here reads a clock."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import DateTime
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction
from sqlalchemy.types import TypeDecorator, TypeEngine


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC datetime; a naive one is refused with ValueError, since nobody can know which zone it means.

    PostgreSQL stores `timestamptz`, or with `timezone=False` (Laravel's columns) a `timestamp` that holds UTC. SQLite
    stores the text 'YYYY-MM-DD HH:MM:SS.ffffff' in UTC, which sorts as time does. What is read without zone is UTC.
    """

    impl = DateTime
    cache_ok = True

    def __init__(self, timezone: bool = True) -> None:
        super().__init__(timezone=timezone)
        self.timezone = timezone

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(DateTime(timezone=self.timezone))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None or value.utcoffset() is None:
            raise ValueError(f"a naive datetime has no place in the tables: {value!r}")
        value = value.astimezone(UTC)
        return value if self.timezone and dialect.name == "postgresql" else value.replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class utc_now(GenericFunction[datetime]):  # noqa: N801 - used as SQLAlchemy's own functions are
    """The database's clock, in the form in which this database stores times. On SQLite it has milliseconds."""

    type = UtcDateTime()
    inherit_cache = True


@compiles(utc_now)
def _standard(*_: object, **__: object) -> str:
    return "now()"


@compiles(utc_now, "sqlite")
def _sqlite(*_: object, **__: object) -> str:
    return "strftime('%Y-%m-%d %H:%M:%f', 'now')"
