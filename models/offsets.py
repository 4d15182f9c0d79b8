"""How far each processor has read each partition: the offset of truth, beside the state that it belongs to."""

from datetime import datetime

from sqlalchemy import BigInteger, Boolean, Column, Integer, Text, false
from sqlmodel import Field

from models.base import Table
from models.times import UtcDateTime, utc_now


class ProcessorOffset(Table, table=True):
    """`next_offset` is the first record not settled yet; `epoch` rises with each replay and fences older readers.

    `starts` counts how often decoding began there without progress. `end_offset` and `seen_at` are the partition's end
    as it was last observed, so that SQL can show the lag; `last_id` and `last_timestamp_ms` tell a stream made anew.
    """

    __tablename__ = "processor_offsets"

    processor: str = Field(sa_column=Column(Text, primary_key=True))
    stream: str = Field(sa_column=Column(Text, primary_key=True))
    partition: int = Field(sa_column=Column(Integer, primary_key=True, autoincrement=False))
    next_offset: int = Field(default=0, sa_column=Column(BigInteger, nullable=False, server_default="0"))
    epoch: int = Field(default=0, sa_column=Column(Integer, nullable=False, server_default="0"))
    paused: bool = Field(default=False, sa_column=Column(Boolean, nullable=False, server_default=false()))
    paused_reason: str | None = Field(default=None, sa_column=Column(Text))
    halted_reason: str | None = Field(default=None, sa_column=Column(Text))
    starts: int = Field(default=0, sa_column=Column(Integer, nullable=False, server_default="0"))
    last_id: str | None = Field(default=None, sa_column=Column(Text))
    last_timestamp_ms: int | None = Field(default=None, sa_column=Column(BigInteger))
    end_offset: int | None = Field(default=None, sa_column=Column(BigInteger))
    seen_at: datetime | None = Field(default=None, sa_column=Column(UtcDateTime))
    updated_at: datetime | None = Field(
        default=None, sa_column=Column(UtcDateTime, nullable=False, server_default=utc_now())
    )
