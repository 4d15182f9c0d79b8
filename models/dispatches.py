"""One row per recipient: the e-mail, its outcome, and what the engine needs to send it once."""

from datetime import datetime
from typing import Any, ClassVar, Literal

from sqlalchemy import JSON, BigInteger, Boolean, CheckConstraint, Column, Index, Integer, String, Text, false, text
from sqlmodel import Field

from models.base import NEVER_REUSED, BigId, Table
from models.retrying import NotRetried, Why, why_not_retryable
from models.times import UtcDateTime

Status = Literal["pending", "sent", "failed"]

IMPORT_MAILABLE_TYPE = "App\\Mail\\ImporteRegistrationMail"
"""`mailable_type` of the import's e-mails, as the old service wrote it and as new rows still carry it."""

STATUS_CHECK = "status IN ('pending', 'sent', 'failed')"
NEVER_RESENT_CHECK = "status IS NULL OR status <> 'pending' OR (sent_at IS NULL AND NOT held)"
"""What makes a careless UPDATE of sent or held rows impossible. (`status IS DISTINCT FROM 'pending' OR ...`, in words
that SQLite before 3.39 knows too.)"""

DUE = {
    "postgresql": "coalesce(queued_until, next_attempt_at, created_at AT TIME ZONE 'UTC')",
    "sqlite": "coalesce(queued_until, next_attempt_at, created_at)",
}
"""The relay's order, by dialect. A query uses the index only if it says exactly this."""


def _due_index(dialect: str) -> Index:
    index = Index(
        "ix_email_dispatches_due",
        text(DUE[dialect]),
        postgresql_where=text("status = 'pending'"),
        sqlite_where=text("status = 'pending'"),
    )
    return index.ddl_if(dialect=dialect)


class EmailDispatch(Table, table=True):
    """A row of the table that the old service made, and its expansion.

    People own `status`, `attempts` (tries since the last reset) and `next_attempt_at` (not before; null = now). The
    engine owns `claim_no`, `lease_until`, `queued_until`, `doubts` and `held`. Status null: inserted by old code.
    """

    __tablename__ = "email_dispatches"
    __table_args__: ClassVar[Any] = (
        CheckConstraint(STATUS_CHECK, name="status"),
        CheckConstraint(NEVER_RESENT_CHECK, name="pending_never_sent_nor_held"),
        Index("uq_email_dispatches_idempotency_key", "idempotency_key", unique=True),
        Index("ix_email_dispatches_batch_id", "batch_id"),
        # Partial, so that the change from pending to sent touches it never: that is the hot update.
        Index(
            "ix_email_dispatches_failed",
            "id",
            postgresql_where=text("status = 'failed'"),
            sqlite_where=text("status = 'failed'"),
        ),
        _due_index("postgresql"),
        _due_index("sqlite"),
        NEVER_REUSED,
    )

    id: int | None = Field(default=None, sa_column=Column(BigId, primary_key=True, autoincrement=True))
    to: str = Field(sa_column=Column(Text, nullable=False))
    subject: str = Field(sa_column=Column(Text, nullable=False))
    content: str = Field(sa_column=Column(Text, nullable=False))
    mailable_type: str = Field(sa_column=Column(Text, nullable=False))
    meta: Any = Field(default=None, sa_column=Column(JSON(none_as_null=True)))
    dispatched_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime(timezone=False)))
    created_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime(timezone=False)))
    updated_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime(timezone=False)))

    status: Status | None = Field(default=None, sa_column=Column(Text))
    idempotency_key: str | None = Field(default=None, sa_column=Column(String(64)))
    attempts: int = Field(default=0, sa_column=Column(Integer, nullable=False, server_default="0"))
    error_message: str | None = Field(default=None, sa_column=Column(Text))
    sent_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    batch_id: str | None = Field(default=None, sa_column=Column(String(64)))
    batch_index: int | None = Field(default=None, sa_column=Column(Integer))
    message_id: str | None = Field(default=None, sa_column=Column(Text))
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
            raise NotRetried(f"e-mail {self.id} {why}: not retried")
        self.status, self.attempts, self.error_message, self.next_attempt_at = "pending", 0, None, None

    def not_retryable(self, now: datetime) -> Why | None:
        """Why it cannot be retried at this time, None if it can."""
        return why_not_retryable(self.status, self.held, self.lease_until, now)
