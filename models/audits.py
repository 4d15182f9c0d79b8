"""Who changed what: the schema of owen-it/laravel-auditing, filled by triggers so that SQL by hand is seen too."""

from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import BigInteger, Column, Index, String, Text
from sqlalchemy.dialects.postgresql import INET
from sqlmodel import Field

from models.base import NEVER_REUSED, BigId, Table
from models.times import UtcDateTime

DISPATCH_TYPE = "App\\Models\\EmailDispatch"
"""`auditable_type` of the rows of email_dispatches: the class that the old service audits."""
EVENT_TYPE = "App\\Models\\OutboxEvent"
"""The same of outbox_events."""
REQUEST_TYPE = "App\\Models\\RepaymentRequest"
"""The same of repayment_requests."""
PAYMENT_TYPE = "App\\Models\\Payment"
"""The same of payments, whose audits the processor of repayments writes."""


class Audit(Table, table=True):
    """One change of a row: the changed columns as JSON objects before and after, and in `tags` who did it."""

    __tablename__ = "audits"
    __table_args__: ClassVar[Any] = (
        Index("audits_user_id_user_type_index", "user_id", "user_type"),
        Index("audits_auditable_type_auditable_id_index", "auditable_type", "auditable_id"),
        NEVER_REUSED,
    )

    id: int | None = Field(default=None, sa_column=Column(BigId, primary_key=True, autoincrement=True))
    user_type: str | None = Field(default=None, sa_column=Column(String(255)))
    user_id: int | None = Field(default=None, sa_column=Column(BigInteger))
    event: str = Field(sa_column=Column(String(255), nullable=False))
    auditable_type: str = Field(sa_column=Column(String(255), nullable=False))
    auditable_id: int = Field(sa_column=Column(BigInteger, nullable=False))
    old_values: str | None = Field(default=None, sa_column=Column(Text))
    new_values: str | None = Field(default=None, sa_column=Column(Text))
    url: str | None = Field(default=None, sa_column=Column(Text))
    ip_address: str | None = Field(default=None, sa_column=Column(String(45).with_variant(INET(), "postgresql")))
    user_agent: str | None = Field(default=None, sa_column=Column(String(1023)))
    tags: str | None = Field(default=None, sa_column=Column(String(255)))
    created_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime(timezone=False)))
    updated_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime(timezone=False)))
