"""Looking into the database: nothing is changed, nobody waited for, and no look takes long."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime

from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from models.times import utc_now

LOOK_SECONDS = 5
_CANCELED = "57014"


class TooSlow(Exception):
    """The database was asked for more than it can find in a few seconds."""


@asynccontextmanager
async def look(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """A connection for reading. Raises TooSlow; PostgreSQL would refuse a write."""
    async with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            await connection.execute(text("SET TRANSACTION READ ONLY"))
            await connection.execute(text(f"SET LOCAL statement_timeout = '{LOOK_SECONDS}s'"))
        else:
            await connection.execution_options(isolation_level="AUTOCOMMIT")  # a look must not wait for writers
        try:
            yield connection
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) == _CANCELED:
                raise TooSlow from error
            raise


async def clock(connection: AsyncConnection) -> datetime:
    """The database's, which decides what is in flight."""
    now: datetime = (await connection.execute(select(utc_now()))).scalar_one()
    return now
