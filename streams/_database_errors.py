"""Which errors of a database mean "try again later", in the words of both drivers and of SQLAlchemy."""

import sys
from collections.abc import Iterator

from sqlalchemy import exc

_READ_ONLY = "25006"

# Classes and codes of SQLSTATE (PostgreSQL, appendix A) after which the same statement may succeed.
_PASSING_CLASSES = ("08", "40", "53", "58")  # connection, rolled back by the server, resources, system
_PASSING_CODES = {
    _READ_ONLY,
    "55P03",  # lock_not_available
    "57P01",  # admin_shutdown
    "57P02",  # crash_shutdown
    "57P03",  # cannot_connect_now
    "57P05",  # idle_session_timeout
    "25P03",  # idle_in_transaction_session_timeout
}
_PASSING_SQLITE = {"BUSY", "LOCKED", "IOERR", "FULL", "CANTOPEN", "READONLY", "PROTOCOL"}
# The plan of a prepared statement met a table that a migration has just changed; the next try prepares anew.
_STALE_PLANS = {"InvalidCachedStatementError", "OutdatedSchemaCacheError"}

# asyncpg has read that the server ends this session, but not yet that the connection closed, and is asked meanwhile.
_LOST_TRACK = {"InternalClientError"}


def is_away(error: BaseException) -> bool:
    """True when the database was away, or refused for now: connection lost or refused, read-only after a failover,
    starting or stopping, out of resources, locked, deadlocked, or no connection of the pool became free in time.

    False for what will fail again: wrong SQL, a violated constraint, a wrong password, no such database. An OSError is
    taken for the network's, so ask only about errors of the database.
    """
    return any(_passes(each) for each in _causes(error))


def is_read_only(error: BaseException) -> bool:
    """True when PostgreSQL refused a write because this server, or this session, is read-only."""
    return any(getattr(each, "sqlstate", None) == _READ_ONLY for each in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it wraps: SQLAlchemy's holds the driver's in `orig`, whose cause is the driver's own."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = getattr(seen, "orig", None) or seen.__cause__


def _passes(error: BaseException) -> bool:
    if isinstance(error, exc.DBAPIError) and error.connection_invalidated:
        return True
    if isinstance(error, exc.TimeoutError | OSError):
        return True
    sqlite = sys.modules.get("sqlite3")  # 2 MB that a process on PostgreSQL need not hold
    if sqlite is not None and isinstance(error, sqlite.Error):
        code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
        return code in {getattr(sqlite, f"SQLITE_{name}") for name in _PASSING_SQLITE}
    state = getattr(error, "sqlstate", None)
    if isinstance(state, str) and (state in _PASSING_CODES or state.startswith(_PASSING_CLASSES)):
        return True
    return type(error).__name__ in _STALE_PLANS | _LOST_TRACK or _says_closed(error)


def _says_closed(error: BaseException) -> bool:
    """Only words tell that a connection is closed: asyncpg raises InterfaceError for it, aiosqlite ValueError."""
    if type(error).__module__.startswith("asyncpg") or isinstance(error, ValueError):
        text = str(error).lower()
        return any(words in text for words in ("connection is closed", "connection was closed", "connection closed"))
    return False
