"""What all tables share: one MetaData with a naming convention, and the integer key of both databases."""

from typing import ClassVar

from sqlalchemy import BigInteger, Integer, MetaData
from sqlmodel import SQLModel

NAMES = {
    "pk": "pk_%(table_name)s",
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
}


class Table(SQLModel):
    """Base of the tables. Table models validate nothing; the database's constraints do."""

    metadata: ClassVar[MetaData] = MetaData(naming_convention=NAMES)


BigId = BigInteger().with_variant(Integer(), "sqlite")
"""A 64-bit key that counts by itself: bigserial, and SQLite's INTEGER PRIMARY KEY, which is 64 bits wide as well."""

MAX_ID = 2**63 - 1

NEVER_REUSED = {"sqlite_autoincrement": True}
"""SQLite would give the id of a deleted last row to the next one; messages and dead letters name rows by id."""
