"""An event for another system: a row that any application, in any language, inserts in its own transaction.

(event_name, payload) is all that an INSERT needs: the table is a public contract (docs/outbox-contract.md). Here are
its columns, what a person or a processor may make of a row, and for Python one function that adds an event to a
session. Not here: which events there are and where they go (`processors/sync`).
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any, ClassVar, Literal, Protocol

import orjson
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    Index,
    Integer,
    Text,
    TextClause,
    TypeDecorator,
    cast,
    false,
    text,
    type_coerce,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeEngine
from sqlmodel import Field

from models.base import NEVER_REUSED, BigId, Table
from models.retrying import NotRetried, Why, why_not_retryable
from models.times import UtcDateTime, utc_now

Status = Literal["pending", "sent", "failed"]

MAX_PAYLOAD_BYTES = 512 * 1024
"""Of the payload as JSON text. A payload names what happened; files belong elsewhere."""
MAX_NAME = 200
MAX_DEPTH = 50
MAX_EXPONENT = 1000
"""A jsonb column would write 1E+100000 out in full."""

STATUS_CHECK = "status IN ('pending', 'sent', 'failed')"
NEVER_RESENT_CHECK = "status <> 'pending' OR (sent_at IS NULL AND NOT held)"
NAME_CHECK = "event_name <> ''"
OBJECT_CHECK = {"postgresql": "jsonb_typeof(payload) = 'object'", "sqlite": "json_type(payload) = 'object'"}
DUE = "coalesce(next_attempt_at, created_at)"
"""The relay's order of what has no message under way. A query uses the index only if it says exactly this."""


class Payload(TypeDecorator[Mapping[str, Any]]):
    """A JSON object whose numbers keep their form: a fraction is a Decimal here and never a float on its way."""

    impl = JSON
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(JSONB() if dialect.name == "postgresql" else JSON())

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any]:  # noqa: ARG002 - of the base class
        return lambda value: None if value is None else encode(value)

    def column_expression(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        """Read as the database's own text: asyncpg's codec would make floats before we see anything."""
        return type_coerce(cast(column, Text), self)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:  # noqa: ARG002 - as above
        return lambda value: json.loads(value, parse_float=Decimal) if isinstance(value, str) else value


def _pending_index(name: str, order: str | TextClause, condition: str) -> Index:
    where = text(f"status = 'pending' AND {condition}")
    return Index(name, order, postgresql_where=where, sqlite_where=where)


class OutboxEvent(Table, table=True):
    """An event and what became of it.

    People own `status`, `attempts` (tries since the last reset) and `next_attempt_at` (not before; null = now). The
    engine owns `claim_no`, `lease_until`, `queued_until`, `doubts` and `held`. `traceparent` is optional: the W3C
    context of the request that wrote the event, sent on as it is.
    """

    __tablename__ = "outbox_events"
    __table_args__: ClassVar[Any] = (
        CheckConstraint(STATUS_CHECK, name="status"),
        CheckConstraint(NEVER_RESENT_CHECK, name="pending_never_sent_nor_held"),
        CheckConstraint(NAME_CHECK, name="event_name"),
        *(CheckConstraint(rule, name="payload").ddl_if(dialect=d) for d, rule in OBJECT_CHECK.items()),
        Index("ix_outbox_events_status_created_at", "status", "created_at"),
        Index("ix_outbox_events_event_name", "event_name"),
        _pending_index("ix_outbox_events_waiting", text(DUE), "queued_until IS NULL"),
        _pending_index("ix_outbox_events_queued", "queued_until", "queued_until IS NOT NULL"),
        NEVER_REUSED,
    )

    id: int | None = Field(default=None, sa_column=Column(BigId, primary_key=True, autoincrement=True))
    event_name: str = Field(sa_column=Column(Text, nullable=False))
    payload: Any = Field(sa_column=Column(Payload, nullable=False))
    status: Status = Field(default="pending", sa_column=Column(Text, nullable=False, server_default="pending"))
    attempts: int = Field(default=0, sa_column=Column(Integer, nullable=False, server_default="0"))
    last_error: str | None = Field(default=None, sa_column=Column(Text))
    sent_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    traceparent: str | None = Field(default=None, sa_column=Column(Text))
    created_at: datetime | None = Field(
        default=None, sa_column=Column(UtcDateTime, nullable=False, server_default=utc_now())
    )
    updated_at: datetime | None = Field(
        default=None, sa_column=Column(UtcDateTime, nullable=False, server_default=utc_now())
    )
    next_attempt_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))

    claim_no: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default="0"))
    lease_until: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    queued_until: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    doubts: int = Field(default=0, sa_column=Column(Integer, nullable=False, server_default="0"))
    held: bool = Field(default=False, sa_column=Column(Boolean, nullable=False, server_default=false()))

    # ---- what may become of it; the hot statements (`streams/rows.py`) write the same, many rows at once

    def mark_sent(self, at: datetime) -> None:
        """It was accepted, whoever had it in hand: a fact, and final."""
        self.status, self.sent_at, self.last_error, self.held = "sent", at, None, False
        self._clear_times()

    def register_failure(self, error: str, max_attempts: int = 3, retry_at: datetime | None = None) -> None:
        """An attempt failed. It was counted when it was claimed; at the limit the event is failed."""
        self.last_error = error
        self._clear_times()
        if self.attempts >= max_attempts:
            self.status = "failed"
        else:
            self.next_attempt_at = retry_at

    def retry(self, now: datetime) -> None:
        """A person wants it tried again, from the first attempt on. Raises NotRetried, which names why not."""
        why = self.not_retryable(now)
        if why is not None:
            raise NotRetried(f"event {self.id} {why}: not retried")
        self.status, self.attempts, self.last_error, self.next_attempt_at = "pending", 0, None, None

    def not_retryable(self, now: datetime) -> Why | None:
        """Why it cannot be retried at this time, None if it can."""
        return why_not_retryable(self.status, self.held, self.lease_until, now)

    def _clear_times(self) -> None:
        self.next_attempt_at = self.lease_until = self.queued_until = None


# ---- writing one


class InvalidEvent(ValueError):
    """An event that is refused before anything is written; the text says why and quotes nothing of the payload."""


class Session(Protocol):
    """A session of SQLAlchemy or SQLModel, async or not."""

    def add(self, instance: Any, /) -> None: ...


def add_event(
    session: Session, event_name: str, payload: Mapping[str, Any], *, traceparent: str | None = None
) -> OutboxEvent:
    """Add an event to the session: it exists if and only if the session's transaction commits.

    Write numbers with a fraction as Decimal: they arrive as they were written (10.10 stays 10.10). Raises
    InvalidEvent for an empty name or payload, and for a payload that is no JSON object or larger than
    `MAX_PAYLOAD_BYTES`.
    """
    if not isinstance(event_name, str) or not event_name.strip():
        raise InvalidEvent("an event needs a name")
    if len(event_name) > MAX_NAME or not event_name.isprintable():
        raise InvalidEvent(f"the name of an event is at most {MAX_NAME} printable characters")
    size = len(encode(payload).encode())
    if size > MAX_PAYLOAD_BYTES:
        raise InvalidEvent(f"the payload has {size:,} bytes, more than {MAX_PAYLOAD_BYTES:,}")
    event = OutboxEvent(event_name=event_name, payload=payload, traceparent=_context(traceparent))
    session.add(event)
    return event


def encode(payload: object) -> str:
    """A payload as JSON text. Raises InvalidEvent for anything that is not a JSON object with something in it."""
    if not isinstance(payload, Mapping):
        raise InvalidEvent("the payload must be a JSON object")
    if not payload:
        raise InvalidEvent("the payload is empty")
    try:
        return orjson.dumps(_value(payload, MAX_DEPTH)).decode()
    except orjson.JSONEncodeError as error:
        raise InvalidEvent(f"the payload cannot be written as JSON: {error}") from None


def _value(value: object, depth: int) -> object:
    """What orjson writes as we want it: it would make NaN null, and knows neither Decimal nor integers of 65 bits."""
    if depth <= 0:
        raise InvalidEvent(f"the payload is nested deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return orjson.Fragment(str(int(value)))
    if isinstance(value, float | Decimal):
        return orjson.Fragment(_number(value))
    if isinstance(value, Mapping):
        return {_key(key): _value(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_value(item, depth - 1) for item in value]
    raise InvalidEvent(f"the payload holds a {type(value).__name__}, which JSON does not have")


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise InvalidEvent("the keys of a JSON object are strings")
    return _text(key)


def _text(value: str) -> str:
    if "\0" in value:
        raise InvalidEvent("the payload holds a NUL character, which the database cannot store")
    return value


def _number(value: float | Decimal) -> str:
    if not (value.is_finite() if isinstance(value, Decimal) else math.isfinite(value)):
        raise InvalidEvent("the payload holds NaN or an infinity, which JSON does not have")
    if isinstance(value, Decimal) and value and abs(value.adjusted()) > MAX_EXPONENT:
        raise InvalidEvent("the payload holds a number beyond all measure")
    return repr(value) if isinstance(value, float) else str(value)


TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
"""W3C Trace Context, level 1."""


def _context(traceparent: str | None) -> str | None:
    if traceparent is not None and not TRACEPARENT.fullmatch(traceparent):
        raise InvalidEvent("traceparent is not as W3C Trace Context has it")
    return traceparent
