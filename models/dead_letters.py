"""What could not be done, each with its reason, one command away from being tried again."""

from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import BigInteger, Column, Index, Integer, LargeBinary, String, Text, text
from sqlmodel import Field

from models.base import NEVER_REUSED, BigId, Table
from models.times import UtcDateTime, utc_now


def _partial(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    return Index(name, *columns, unique=unique, postgresql_where=text(where), sqlite_where=text(where))


def _once(name: str, *columns: str, where: str) -> Index:
    return _partial(name, *columns, where=where, unique=True)


_ITEM = "row_id IS NULL AND batch_id IS NOT NULL"
_RECORD = "row_id IS NULL AND batch_id IS NULL"


class DeadLetter(Table, table=True):
    """One message laid to rest: of a row (`table_name`, `row_id`, `claim_no`), of an item of a batch, or of a record.

    `reason` is a code for machines, `error` a sentence; neither they nor `message_key` ever hold an address. `body` are
    the original bytes. Each kind has its own unique index, so that a replay or a late process adds none. `first_at` is
    when the work on it began, null when that is `created_at`; `redriven_from` names the letter that was redriven and
    has come to this. `queued_until` and `published_at` are of its message, not of the redrive; a `redriven_by` without
    `redriven_at` is a redrive that was begun.
    """

    __tablename__ = "dead_letters"
    __table_args__: ClassVar[Any] = (
        _once("uq_dead_letters_row", "table_name", "row_id", "claim_no", where="row_id IS NOT NULL"),
        _once("uq_dead_letters_item", "batch_id", "item_index", where=f"{_ITEM} AND redriven_from IS NULL"),
        _once(
            "uq_dead_letters_item_again",
            *("batch_id", "item_index", "redriven_from"),
            where=f"{_ITEM} AND redriven_from IS NOT NULL",
        ),
        _once(
            "uq_dead_letters_record",
            *("processor", "source_stream", "source_partition", "source_offset", "body_hash"),
            where=_RECORD,
        ),
        _partial("ix_dead_letters_body_hash", "body_hash", where=_RECORD),
        _partial("ix_dead_letters_unpublished", "id", where="published_at IS NULL"),
        NEVER_REUSED,
    )

    id: int | None = Field(default=None, sa_column=Column(BigId, primary_key=True, autoincrement=True))
    processor: str = Field(sa_column=Column(Text, nullable=False))
    source_stream: str = Field(sa_column=Column(Text, nullable=False))
    source_partition: int = Field(sa_column=Column(Integer, nullable=False))
    source_offset: int | None = Field(default=None, sa_column=Column(BigInteger))
    item_index: int | None = Field(default=None, sa_column=Column(Integer))
    batch_id: str | None = Field(default=None, sa_column=Column(String(64)))
    message_key: str | None = Field(default=None, sa_column=Column(Text))
    table_name: str | None = Field(default=None, sa_column=Column(Text))
    row_id: int | None = Field(default=None, sa_column=Column(BigInteger))
    claim_no: int | None = Field(default=None, sa_column=Column(BigInteger))
    reason: str = Field(sa_column=Column(Text, nullable=False))
    error: str = Field(sa_column=Column(Text, nullable=False))
    attempts: int = Field(default=0, sa_column=Column(Integer, nullable=False, server_default="0"))
    body: bytes | None = Field(default=None, sa_column=Column(LargeBinary))
    body_hash: str | None = Field(default=None, sa_column=Column(String(64)))
    created_at: datetime | None = Field(
        default=None, sa_column=Column(UtcDateTime, nullable=False, server_default=utc_now())
    )
    redriven_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    redriven_by: str | None = Field(default=None, sa_column=Column(Text))
    queued_until: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    published_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    first_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    redriven_from: int | None = Field(default=None, sa_column=Column(BigInteger))
