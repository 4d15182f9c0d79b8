"""Payments, their installments, and the repayments that split one anew; and the rows of the requests for that.

Money is Decimal with cents, on every database. What a request says is `repayment_requests.py`; here is what is kept.
Not here: what is done for a request (`processors/repayments`).
"""

from datetime import date, datetime
from decimal import Decimal
from typing import Any, ClassVar, Literal

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Date,
    ForeignKey,
    Index,
    Integer,
    Numeric,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeEngine
from sqlmodel import Field

from models.base import NEVER_REUSED, BigId, Table
from models.repayment_requests import CENT
from models.retrying import NotRetried, Why, why_not_retryable
from models.times import UtcDateTime, utc_now

PaymentStatus = Literal["open", "overdue", "paid", "cancelled", "renegotiated"]
OPEN: tuple[PaymentStatus, ...] = ("open", "overdue")
"""Of these something is still to be paid."""

STATUS_CHECK = "status IN ('open', 'overdue', 'paid', 'cancelled', 'renegotiated')"
PART_STATUS_CHECK = "status IN ('open', 'overdue', 'paid', 'cancelled')"
VALUE_CHECK = "CAST(value AS numeric) > 0"
REQUEST_STATUS_CHECK = "status IN ('pending', 'sent', 'failed')"
NEVER_RESENT_CHECK = "status <> 'pending' OR (sent_at IS NULL AND NOT held)"
DUE = "coalesce(queued_until, next_attempt_at, created_at)"
"""The relay's order. A query uses the index only if it says exactly this."""


class Money(TypeDecorator[Decimal]):
    """An amount with two decimals: numeric(14, 2), and on SQLite, which has no decimals, its text."""

    impl = Numeric
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(Numeric(14, 2) if dialect.name == "postgresql" else Text())

    def process_bind_param(self, value: Decimal | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        if not isinstance(value, Decimal):
            raise TypeError(f"an amount is a Decimal and no {type(value).__name__}")
        amount = value.quantize(CENT)
        return amount if dialect.name == "postgresql" else str(amount)

    def process_result_value(self, value: Any, dialect: Dialect) -> Decimal | None:  # noqa: ARG002 - of the base class
        return None if value is None else Decimal(value)


def _number() -> Any:
    return Field(default=None, sa_column=Column(BigId, primary_key=True, autoincrement=True))


def _now() -> Any:
    return Field(default=None, sa_column=Column(UtcDateTime, nullable=False, server_default=utc_now()))


def _text(**more: Any) -> Any:
    return Field(sa_column=Column(Text, nullable=False, **more))


class Payment(Table, table=True):
    """What a customer owes or has paid. `customer` and `gateway_id` are the gateway's ids.

    Paid in parts, `gateway_id` is that of the whole plan, and each part has its own.
    """

    __tablename__ = "payments"
    __table_args__: ClassVar[Any] = (
        CheckConstraint(STATUS_CHECK, name="status"),
        CheckConstraint(VALUE_CHECK, name="value"),
        NEVER_REUSED,
    )

    id: int | None = _number()
    reference: str = _text(unique=True)
    customer: str = _text()
    billing_type: str = _text()
    value: Decimal = Field(sa_column=Column(Money, nullable=False))
    status: PaymentStatus = Field(default="open", sa_column=Column(Text, nullable=False, server_default="open"))
    due_date: date = Field(sa_column=Column(Date, nullable=False))
    gateway_id: str | None = Field(default=None, sa_column=Column(Text, unique=True))
    product_slug: str | None = Field(default=None, sa_column=Column(Text))
    created_at: datetime | None = _now()
    updated_at: datetime | None = _now()


class PaymentInstallment(Table, table=True):
    """A part of a payment; `number` counts from 1."""

    __tablename__ = "installments"
    __table_args__: ClassVar[Any] = (
        CheckConstraint(PART_STATUS_CHECK, name="status"),
        CheckConstraint(VALUE_CHECK, name="value"),
        UniqueConstraint("payment_id", "number"),
        NEVER_REUSED,
    )

    id: int | None = _number()
    payment_id: int = Field(sa_column=Column(BigInteger, ForeignKey("payments.id"), nullable=False))
    number: int = Field(sa_column=Column(Integer, nullable=False))
    value: Decimal = Field(sa_column=Column(Money, nullable=False))
    status: str = Field(default="open", sa_column=Column(Text, nullable=False, server_default="open"))
    due_date: date = Field(sa_column=Column(Date, nullable=False))
    gateway_id: str | None = Field(default=None, sa_column=Column(Text, unique=True))
    created_at: datetime | None = _now()
    updated_at: datetime | None = _now()


class Repayment(Table, table=True):
    """A request that was brought about: which payment came of it, and which one it replaces.

    Each of the four is there once: that makes two repayments of one thing impossible, whatever the code does.
    """

    __tablename__ = "repayments"
    __table_args__: ClassVar[Any] = (NEVER_REUSED,)

    id: int | None = _number()
    reference: str = _text(unique=True)
    request_id: int = Field(
        sa_column=Column(BigInteger, ForeignKey("repayment_requests.id"), nullable=False, unique=True)
    )
    payment_id: int = Field(sa_column=Column(BigInteger, ForeignKey("payments.id"), nullable=False, unique=True))
    original_payment_id: int | None = Field(
        default=None, sa_column=Column(BigInteger, ForeignKey("payments.id"), unique=True)
    )
    requested_by: str = _text()
    created_at: datetime | None = _now()


class RepaymentRequestRow(Table, table=True):
    """A request and what became of it; a row as docs/life-of-a-row.md has it, made by the request's first message.

    `body` is the request as it came. `original_payment_id` names no row for sure: that is looked up by the processor.
    """

    __tablename__ = "repayment_requests"
    __table_args__: ClassVar[Any] = (
        CheckConstraint(REQUEST_STATUS_CHECK, name="status"),
        CheckConstraint(NEVER_RESENT_CHECK, name="pending_never_sent_nor_held"),
        Index("ix_repayment_requests_status_created_at", "status", "created_at"),
        Index("ix_repayment_requests_original_payment_id", "original_payment_id"),
        Index(
            "ix_repayment_requests_due",
            text(DUE),
            postgresql_where=text("status = 'pending'"),
            sqlite_where=text("status = 'pending'"),
        ),
        NEVER_REUSED,
    )

    id: int | None = _number()
    reference: str = _text(unique=True)
    body: str = _text()
    original_payment_id: int | None = Field(default=None, sa_column=Column(BigInteger))
    status: Literal["pending", "sent", "failed"] = Field(
        default="pending", sa_column=Column(Text, nullable=False, server_default="pending")
    )
    attempts: int = Field(default=0, sa_column=Column(Integer, nullable=False, server_default="0"))
    last_error: str | None = Field(default=None, sa_column=Column(Text))
    sent_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    traceparent: str | None = Field(default=None, sa_column=Column(Text))
    created_at: datetime | None = _now()
    updated_at: datetime | None = _now()
    next_attempt_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))

    claim_no: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default="0"))
    lease_until: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    queued_until: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    doubts: int = Field(default=0, sa_column=Column(Integer, nullable=False, server_default="0"))
    held: bool = Field(default=False, sa_column=Column(Boolean, nullable=False, server_default=false()))

    def retry(self, now: datetime) -> None:
        """A person wants it tried again, from the first attempt on. Raises NotRetried, which names why not."""
        why = self.not_retryable(now)
        if why is not None:
            raise NotRetried(f"request {self.id} {why}: not retried")
        self.status, self.attempts, self.last_error, self.next_attempt_at = "pending", 0, None, None

    def not_retryable(self, now: datetime) -> Why | None:
        """Why it cannot be retried at this time, None if it can."""
        return why_not_retryable(self.status, self.held, self.lease_until, now)
