"""What was received as one import, and how it was split. How far its mails are is counted from their rows."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Column, Integer, String, Text
from sqlmodel import Field

from models.base import Table
from models.times import UtcDateTime, utc_now


def _count() -> Any:
    return Field(default=0, sa_column=Column(Integer, nullable=False, server_default="0"))


def _time() -> Any:
    return Field(default=None, sa_column=Column(UtcDateTime, nullable=False, server_default=utc_now()))


class ImportBatch(Table, table=True):
    """One list as it was sent; the id is the SHA-256 of its body. The numbers are recomputed from its slices.

    `duplicates` are repeated keys inside a slice; `times_received` is how often the whole list came.
    """

    __tablename__ = "import_batches"

    batch_id: str = Field(sa_column=Column(String(64), primary_key=True))
    total: int = _count()
    received: int = _count()
    valid: int = _count()
    rejected: int = _count()
    duplicates: int = _count()
    times_received: int = _count()
    created_at: datetime | None = _time()
    updated_at: datetime | None = _time()


class ImportSlice(Table, table=True):
    """One record of stream `imports`. Keyed by where it was read, so that a repeated turn counts it once."""

    __tablename__ = "import_slices"

    stream: str = Field(sa_column=Column(Text, primary_key=True))
    partition: int = Field(sa_column=Column(Integer, primary_key=True, autoincrement=False))
    source_offset: int = Field(sa_column=Column(BigInteger, primary_key=True, autoincrement=False))
    batch_id: str = Field(sa_column=Column(String(64), primary_key=True, index=True))
    first_index: int = _count()
    items: int = _count()
    valid: int = _count()
    rejected: int = _count()
    duplicates: int = _count()
    created_at: datetime | None = _time()


class BatchDuplicate(Table, table=True):
    """A recipient of a batch whose row belongs to another batch, or to another index of this one."""

    __tablename__ = "batch_duplicates"

    batch_id: str = Field(sa_column=Column(String(64), primary_key=True))
    item_index: int = Field(sa_column=Column(Integer, primary_key=True, autoincrement=False))
    idempotency_key: str = Field(sa_column=Column(String(64), nullable=False))
