"""SQL text on the driver's own connection, the same for PostgreSQL (asyncpg) and SQLite (aiosqlite).

Only the statements of a turn go this way: SQLAlchemy costs 0.25 to 2.3 ms of CPU per commit, more than all else
together. Everything that is not in a turn is plain SQLModel. Here is the driver's manner; the statements are in
`rows.py`, `offsets.py` and `dead_letters.py`.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from streams.database import Dialect, dialect, driver_connection, is_away
from streams.errors import DatabaseAway

log = structlog.get_logger(__name__)

T = TypeVar("T")
Row = Mapping[str, Any]


class Sql(Protocol):
    """A connection that runs SQL text with parameters $1, $2, ..."""

    dialect: Dialect

    async def fetch(self, text: str, *args: object) -> list[Row]:
        """Run one statement and return its rows."""
        ...

    async def many(self, text: str, rows: Sequence[Sequence[object]]) -> None:
        """Run one statement once per row of parameters."""
        ...

    def transaction(self) -> Any:
        """An async context manager: commit at its end, roll back when the block raises."""
        ...


class PostgresSql:
    """asyncpg. A single statement outside of `transaction()` commits by itself: one round trip."""

    dialect: Dialect = "postgresql"

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def fetch(self, text: str, *args: object) -> list[Row]:
        rows: list[Row] = await self.connection.fetch(text, *args)
        return rows

    async def many(self, text: str, rows: Sequence[Sequence[object]]) -> None:
        await self.connection.executemany(text, rows)

    def transaction(self) -> Any:
        return self.connection.transaction()


class SqliteSql:
    """aiosqlite in autocommit mode. Transactions are IMMEDIATE: two writers wait for each other instead of failing."""

    dialect: Dialect = "sqlite"

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def fetch(self, text: str, *args: object) -> list[Row]:
        cursor = await self.connection.execute(_numbered(text), args)
        try:
            names = [column[0] for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in await cursor.fetchall()]
        finally:
            await cursor.close()

    async def many(self, text: str, rows: Sequence[Sequence[object]]) -> None:
        await self.connection.executemany(_numbered(text), rows)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        await self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            from sqlite3 import OperationalError  # noqa: PLC0415 - 2 MB that a process on PostgreSQL need not hold

            with suppress(OperationalError):  # some errors, such as a full disk, roll back by themselves
                await self.connection.execute("ROLLBACK")
            raise
        await self.connection.execute("COMMIT")


def sql(connection: Any, dialect: Dialect) -> Sql:
    """Wrap a driver's connection as `database.driver_connection` hands it out."""
    return PostgresSql(connection) if dialect == "postgresql" else SqliteSql(connection)


class Database:
    """The database as one processor uses it: connections for its statements, and patience while it is away."""

    def __init__(self, engine: AsyncEngine, away_seconds: float) -> None:
        """After `away_seconds` without any success the process gives up: `DatabaseAway`."""
        self._engine, self._away_seconds = engine, away_seconds
        self._answered_at = time.monotonic()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sql]:
        """A connection out of the pool, put back at the end of the block."""
        async with driver_connection(self._engine) as connection:
            yield sql(connection, dialect(self._engine))

    def answered(self) -> None:
        """The database has just done something for us."""
        self._answered_at = time.monotonic()

    async def patiently(self, work: Callable[[Sql], Awaitable[T]]) -> T:
        """Run `work` on a connection; while the database is away, again and again, with back-off."""
        delay, away_since = 0.1, None
        while True:
            try:
                async with self.open() as connection:
                    result = await work(connection)
            except Exception as error:
                if not is_away(error):
                    raise
                if away_since is None or self._answered_at > away_since:
                    delay, away_since = 0.1, time.monotonic()
                elif time.monotonic() - away_since > self._away_seconds:
                    raise DatabaseAway(f"the database has been away for {self._away_seconds:.0f} s") from error
                log.warning("database.away", error=type(error).__name__, again_in=delay)
                await asyncio.sleep(delay)
                delay = min(delay * 2, 5.0)
            else:
                self.answered()
                return result


class KeptDatabase(Database):
    """The same for one task that asks again and again: its connection stays out of the pool between two calls.

    That saves a ping before and a rollback after each call. A connection that an error has passed through is given
    back or thrown away as always, and the next call opens another.
    """

    def __init__(self, engine: AsyncEngine, away_seconds: float) -> None:
        super().__init__(engine, away_seconds)
        self._kept: AsyncExitStack | None = None
        self._sql: Sql | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sql]:
        """The kept connection; only one caller at a time. SQLite's cost nothing to put back."""
        if dialect(self._engine) == "sqlite":
            async with super().open() as mine:
                yield mine
            return
        if self._kept is None or self._sql is None:
            stack = AsyncExitStack()
            self._sql = await stack.enter_async_context(super().open())
            self._kept = stack
        kept = self._kept
        try:
            yield self._sql
        except BaseException as error:
            self._kept = self._sql = None
            await kept.__aexit__(type(error), error, error.__traceback__)
            raise

    async def close(self) -> None:
        """Give it back."""
        kept, self._kept, self._sql = self._kept, None, None
        if kept is not None:
            with suppress(Exception):  # it may have broken meanwhile; between two calls nothing of ours is under way
                await kept.aclose()


def storable(text: str, limit: int | None = None) -> str:
    """The text as both databases can keep it: without the NUL and the lone surrogates that others may send."""
    return text[:limit].encode(errors="replace").decode().replace("\0", "\ufffd")


_PARAMETER = re.compile(r"\$(\d+)")


def _numbered(text: str) -> str:
    return _PARAMETER.sub(r"?\1", text)


# ---- the few expressions that differ; times are always the database's own


def now(dialect: Dialect) -> str:
    """The database's clock; on SQLite UTC text with milliseconds, comparable with what SQLAlchemy stores."""
    return "now()" if dialect == "postgresql" else "strftime('%Y-%m-%d %H:%M:%f', 'now')"


def later(dialect: Dialect, seconds: str) -> str:
    """The database's clock plus an SQL expression in seconds."""
    if dialect == "postgresql":
        return f"now() + make_interval(secs => ({seconds})::float8)"
    return f"strftime('%Y-%m-%d %H:%M:%f', 'now', ({seconds}) || ' seconds')"


def greatest(dialect: Dialect, *values: str) -> str:
    """The greatest of SQL expressions that are not null."""
    return f"{'greatest' if dialect == 'postgresql' else 'max'}({', '.join(values)})"


def recordset(dialect: Dialect, parameter: str, alias: str, columns: Mapping[str, str]) -> str:
    """A FROM item made of one JSON parameter, an array of objects. `columns` maps names to PostgreSQL types.

    One JSON parameter costs 4 us a row more than arrays and works alike on both databases.
    """
    if dialect == "postgresql":
        fields = ", ".join(f'"{name}" {kind}' for name, kind in columns.items())
        return f"json_to_recordset({parameter}::json) AS {alias}({fields})"
    fields = ", ".join(f"json_extract(value, '$.{name}') AS \"{name}\"" for name in columns)
    return f"(SELECT {fields} FROM json_each({parameter})) AS {alias}"


def among(dialect: Dialect, value: str, parameter: str) -> str:
    """Whether a number is one of a parameter that `numbers` has made."""
    if dialect == "postgresql":
        return f"{value} = ANY({parameter}::bigint[])"
    return f"{value} IN (SELECT value FROM json_each({parameter}))"


def numbers(dialect: Dialect, values: Sequence[int]) -> object:
    """Integers as one parameter."""
    return list(values) if dialect == "postgresql" else str(list(values))


def item(dialect: Dialect, array: str, index: str) -> str:
    """Element `index` (from 0) of a JSON array of numbers, null beyond its end."""
    if dialect == "postgresql":
        return f"({array}->>({index}))::float8"
    return f"json_extract({array}, '$[' || ({index}) || ']')"
