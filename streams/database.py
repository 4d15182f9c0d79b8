"""The door to the database: engines for PostgreSQL and SQLite that recover by themselves, and the driver's connection.

Not here: queries. Each lives with the one who asks.

Why these settings:

- SQLite, `synchronous=FULL`: in WAL mode NORMAL loses the last commits when the power fails. A mail recorded as sent
  would be pending again and go out twice; one fsync per commit (which holds a group of outcomes) is the price.
- SQLite, `BEGIN IMMEDIATE` always: a transaction that reads first and writes later fails at once, whatever the
  time-out, when somebody else wrote in between. Taking the write lock at the start makes writers wait instead.
- PostgreSQL, UTC per session: Laravel's columns have no zone, so `now()` stored there would mean the server's.
- PostgreSQL, time-outs of the socket: a server that vanished without a word is noticed in half a minute, not in 15.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, event, exc, make_url
from sqlalchemy.engine import URL, ExceptionContext
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from streams._database_errors import is_away, is_read_only
from streams.errors import BadSettings

__all__ = ["connect", "dialect", "driver_connection", "is_away"]

Dialect = Literal["postgresql", "sqlite"]

BUSY_SECONDS = 30
SILENCE_SECONDS = 30
POOL_WAIT_SECONDS = 30


def connect(url: str, application_name: str, *, pool_size: int = 5) -> AsyncEngine:
    """An engine for postgresql+asyncpg:// or sqlite+aiosqlite:///path; opens nothing yet.

    PostgreSQL shows `application_name` in pg_stat_activity and the audit notes it. `pool_size` connections are kept; as
    many more are opened when all are in use. Raises BadSettings for any other URL, or a folder that does not exist.
    """
    parsed = _checked(url)
    pool = {"pool_size": pool_size, "max_overflow": pool_size, "pool_timeout": POOL_WAIT_SECONDS}
    options: dict[str, Any] = {**pool, "hide_parameters": True}  # errors are logged, parameters are people's data
    if parsed.drivername == "postgresql+asyncpg":
        engine = create_async_engine(
            parsed,
            pool_pre_ping=True,
            pool_recycle=1800,
            connect_args={
                "server_settings": {"application_name": application_name, "timezone": "UTC"},
                "timeout": 10,
            },
            **options,
        )
        _notice_silence(engine.sync_engine)
    else:
        # AUTOCOMMIT is what a connection goes back to when somebody asked for a level of his own; see _prepare_sqlite
        engine = create_async_engine(
            parsed, connect_args={"timeout": BUSY_SECONDS}, isolation_level="AUTOCOMMIT", **options
        )
        _prepare_sqlite(engine.sync_engine)
    _distrust_read_only(engine.sync_engine)
    return engine


def dialect(engine: AsyncEngine) -> Dialect:
    """Which of the two databases this engine talks to: whose SQL to use."""
    return cast(Dialect, engine.dialect.name)


@asynccontextmanager
async def driver_connection(engine: AsyncEngine) -> AsyncIterator[Any]:
    """The driver's own connection (asyncpg's or aiosqlite's) out of the pool, for the few hot statements.

    No transaction is open: asyncpg commits each statement, or use its `transaction()`; on SQLite say `BEGIN IMMEDIATE`.
    JSON parameters are text; PostgreSQL's JSON results arrive parsed. A connection whose state is not known for sure
    (cancelled in the middle, server away, transaction left open) is thrown away, never put back. Leaving a transaction
    open is a mistake that looks like success, so it raises RuntimeError.
    """
    pooled = await engine.connect()
    known = False
    try:
        connection = (await pooled.get_raw_connection()).driver_connection
        try:
            yield connection
        except Exception as error:
            known = not is_away(error) and not _in_transaction(connection)
            if is_read_only(error):
                _distrusted[engine.sync_engine] = time.monotonic()
            raise
        known = not _in_transaction(connection)
        if not known:
            raise RuntimeError("a transaction was left open; its writes are lost")
    finally:
        await _outlive_cancellation(pooled, known)


# ---- settings


def _checked(url: str) -> URL:
    try:
        parsed = make_url(url)
    except exc.ArgumentError:
        raise BadSettings("DATABASE_URL is not a URL") from None
    if parsed.drivername not in {"postgresql+asyncpg", "sqlite+aiosqlite"}:
        raise BadSettings(
            "DATABASE_URL must begin with postgresql+asyncpg:// or sqlite+aiosqlite:///, "
            f"not with {parsed.drivername}://"
        )
    if not parsed.database:
        raise BadSettings("DATABASE_URL names no database")
    if parsed.drivername == "sqlite+aiosqlite":
        _check_file(parsed.database)
    return parsed


def _check_file(name: str) -> None:
    if ":memory:" in name:
        raise BadSettings("DATABASE_URL names a database in memory: each connection would have its own")
    if not name.startswith("file:") and not Path(name).absolute().parent.is_dir():
        raise BadSettings(f"DATABASE_URL: there is no folder {Path(name).absolute().parent}")


def _prepare_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver's own BEGIN comes late and is deferred
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
            connection.exec_driver_sql("BEGIN IMMEDIATE")


def _notice_silence(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: Any) -> None:
        transport = getattr(connection.driver_connection, "_transport", None)
        sock = transport.get_extra_info("socket") if transport else None
        if sock is None or sock.family not in {socket.AF_INET, socket.AF_INET6}:
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", SILENCE_SECONDS // 3),
            ("TCP_KEEPINTVL", SILENCE_SECONDS // 6),
            ("TCP_KEEPCNT", 4),
            ("TCP_USER_TIMEOUT", SILENCE_SECONDS * 1000),
        ):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# ---- a failover: the old server answers every ping and refuses every write

_distrusted: WeakKeyDictionary[Engine, float] = WeakKeyDictionary()


def _distrust_read_only(engine: Engine) -> None:
    """Once a write was refused as read-only, use no connection from before: a ping tells no good one from a bad one."""

    @event.listens_for(engine, "connect")
    def born(_connection: Any, record: Any) -> None:
        record.info["born"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def check(_connection: Any, record: Any, _proxy: Any) -> None:
        if record.info["born"] < _distrusted.get(engine, 0.0):
            raise exc.DisconnectionError("this connection may lead to a server that has become read-only")

    @event.listens_for(engine, "handle_error")
    def refused(context: ExceptionContext) -> None:
        if is_read_only(context.original_exception):
            _distrusted[engine] = time.monotonic()
            context.is_disconnect = True


# ---- putting connections back

_closing: set[asyncio.Task[None]] = set()


def _in_transaction(connection: Any) -> bool:
    if hasattr(connection, "is_in_transaction"):
        return bool(connection.is_closed() or connection.is_in_transaction())
    try:
        return bool(connection.in_transaction)
    except ValueError:  # closed
        return True


async def _outlive_cancellation(pooled: AsyncConnection, known: bool) -> None:
    """Put the connection back or throw it away; a second cancellation ends the waiting, not the work."""

    async def finish() -> None:
        if not known:
            await pooled.invalidate()
        await pooled.close()

    task = asyncio.create_task(finish())
    _closing.add(task)
    task.add_done_callback(_closing.discard)
    await asyncio.shield(task)
