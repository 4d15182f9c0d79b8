"""The file of an embedded log: its tables and every statement on them. Synchronous: `embedded.py` gives it a thread.

Each partition has a table of its own whose row id is the offset, so that publishing appends to a B-tree and reading
walks along it. The file has its own SQLite application id: the application's database is refused, and cannot be spoilt.
"""

import sqlite3
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from streams._paged import PAGE_BYTES, PAGE_RECORDS
from streams.errors import LogError, LogRefused, StreamMissing
from streams.log import Bounds, Partition, Record, StreamSpec

APPLICATION_ID = 0x41464C55
"""`AFLU`: SQLite's own way to say whose file this is."""

SCHEMA_VERSION = 1

SCHEMA = """
CREATE TABLE streams (
    name TEXT PRIMARY KEY,
    partitions INTEGER NOT NULL,
    max_age_seconds INTEGER NOT NULL,
    max_bytes INTEGER NOT NULL
);
CREATE TABLE partitions (
    id INTEGER PRIMARY KEY,
    stream TEXT NOT NULL REFERENCES streams,
    name TEXT NOT NULL UNIQUE,
    next_offset INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL DEFAULT 0,
    last_timestamp_ms INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE publishers (
    partition_id INTEGER NOT NULL REFERENCES partitions,
    name TEXT NOT NULL,
    highest_id INTEGER NOT NULL,
    PRIMARY KEY (partition_id, name)
) WITHOUT ROWID;
"""

BUSY_SECONDS = 5.0
"""So long a statement waits for another process's transaction."""

TRIM_RECORDS = 1_000
"""So many records at least may one transaction drop for retention; none drops many more."""

_REFUSALS = {
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
}


class _Row(NamedTuple):
    """A partition as stored, with the retention of its stream."""

    id: int
    next_offset: int
    bytes: int
    last_timestamp_ms: int
    max_age_seconds: int
    max_bytes: int


class _Excess(NamedTuple):
    """So many of the oldest records, all below the offset `end`, that retention no longer keeps."""

    records: int
    bytes: int
    end: int


class LogFile:
    """One connection to the file, for the thread that made it. Methods raise LogError, LogRefused or StreamMissing."""

    def __init__(self, path: Path, wall: Callable[[], float] = time.time) -> None:
        self._path = path
        self._wall = wall
        with self._errors():
            _make_private(path)
            self._connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise

    def close(self) -> None:
        """Close the connection; the last one to close folds the write-ahead log into the file."""
        self._connection.close()

    # ---- streams

    def declare(self, spec: StreamSpec) -> None:
        """Create the stream, or note its present retention. It has no segments: records are dropped one by one."""
        with self._transaction():
            known = self._one("SELECT partitions FROM streams WHERE name = ?", spec.name)
            if known is None:
                self._create(spec)
            elif known[0] != spec.partitions:
                raise LogRefused(
                    f"Stream {spec.name} has {known[0]} partitions in {self._path}, not {spec.partitions}."
                )
            self._connection.execute(
                "UPDATE streams SET max_age_seconds = ?, max_bytes = ? WHERE name = ?",
                (spec.max_age_seconds, spec.max_bytes, spec.name),
            )

    def partitions(self, stream: str) -> list[Partition]:
        """The partitions in order."""
        with self._errors():
            names = self._connection.execute("SELECT name FROM partitions WHERE stream = ? ORDER BY id", (stream,))
            found = [Partition(stream, index, name) for index, (name,) in enumerate(names)]
        if not found:
            raise StreamMissing(f"There is no stream {stream} in {self._path}.")
        return found

    def bounds(self, partition: Partition) -> Bounds:
        """The exact bounds, both of the same moment."""
        with self._errors():
            row = self._find(partition)
            first, next_ = self._connection.execute(
                f"SELECT coalesce((SELECT min(offset) FROM {_table(row)}), next_offset), next_offset"  # noqa: S608
                " FROM partitions WHERE id = ?",
                (row.id,),
            ).fetchone()
        return Bounds(first, next_)

    def written_at(self, partition: Partition, offset: int) -> int | None:
        """The time of the first record at or after `offset`, in ms since 1970."""
        with self._errors():
            found = self._one(
                f"SELECT timestamp_ms FROM {_table(self._find(partition))}"  # noqa: S608
                " WHERE offset >= ? ORDER BY offset LIMIT 1",
                offset,
            )
        return int(found[0]) if found else None

    # ---- records

    def page(self, partition: Partition, position: int) -> list[Record]:
        """The records from `position` on, until either limit of a page is reached."""
        page: list[Record] = []
        size = 0
        with self._errors():
            rows = self._connection.execute(
                f"SELECT offset, timestamp_ms, data FROM {_table(self._find(partition))}"  # noqa: S608
                " WHERE offset >= ? ORDER BY offset LIMIT ?",
                (position, PAGE_RECORDS),
            )
            for row in rows:
                page.append(Record(*row))
                size += len(page[-1].data)
                if size >= PAGE_BYTES:
                    break
            rows.close()
        return page

    def append(
        self, partition: Partition, publisher: str | None, messages: Sequence[bytes], ids: Sequence[int] | None
    ) -> None:
        """Store in one transaction what is new under the publisher's name, and drop what is too old or too much."""
        with self._transaction():
            row = self._find(partition)
            if publisher is not None and ids:
                messages = self._only_new(row, publisher, messages, ids)
            if messages:
                self._trim(self._insert(row, messages), max(TRIM_RECORDS, 2 * len(messages)))

    def trim(self) -> None:
        """Apply the retention of every partition, in transactions of a bounded size; writes only if there is need."""
        with self._errors():
            partitions = [Partition(*row) for row in self._connection.execute("SELECT stream, 0, name FROM partitions")]
            for partition in partitions:
                while self._excess(self._find(partition), TRIM_RECORDS).records:
                    with self._transaction():
                        self._trim(self._find(partition), TRIM_RECORDS)

    def version(self) -> int:
        """Another number than before when another connection, of this process or another, has committed."""
        with self._errors():
            return int((self._one("PRAGMA data_version") or (0,))[0])

    # ---- steps

    def _prepare(self) -> None:
        execute = self._connection.execute
        execute("PRAGMA synchronous = FULL")  # NORMAL would lose the last confirmed messages when the power fails
        if self._is_new():
            self._switch_to_wal()
            with self._transaction():
                if self._is_new():  # another process may have been quicker
                    for statement in filter(str.strip, SCHEMA.split(";")):
                        execute(statement)
                    execute(f"PRAGMA application_id = {APPLICATION_ID}")
                    execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _is_new(self) -> bool:
        application, version, tables = self._one(
            "SELECT (SELECT application_id FROM pragma_application_id), (SELECT user_version FROM pragma_user_version),"
            " (SELECT count(*) FROM sqlite_master)"
        ) or (0, 0, 0)
        if (application, version, tables) == (0, 0, 0):
            return True
        if application != APPLICATION_ID:
            raise LogRefused(f"{self._path} is a database of something else; the embedded log needs a file of its own.")
        if version != SCHEMA_VERSION:
            raise LogRefused(
                f"{self._path} has version {version} of the embedded log; this is version {SCHEMA_VERSION}."
            )
        return False

    def _switch_to_wal(self) -> None:
        """Write-ahead logging: readers do not wait for the writer. SQLite does not wait for this lock by itself."""
        give_up = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                    raise
            time.sleep(0.02)

    def _create(self, spec: StreamSpec) -> None:
        execute = self._connection.execute
        execute(
            "INSERT INTO streams (name, partitions, max_age_seconds, max_bytes) VALUES (?, ?, ?, ?)",
            (spec.name, spec.partitions, spec.max_age_seconds, spec.max_bytes),
        )
        for name in [f"{spec.name}-{index}" for index in range(spec.partitions)] or [spec.name]:
            made = execute("INSERT INTO partitions (stream, name) VALUES (?, ?)", (spec.name, name))
            execute(
                f"CREATE TABLE records_{made.lastrowid}"
                " (offset INTEGER PRIMARY KEY, timestamp_ms INTEGER NOT NULL, data BLOB NOT NULL)"
            )

    def _find(self, partition: Partition) -> _Row:
        found = self._one(
            "SELECT id, next_offset, bytes, last_timestamp_ms, max_age_seconds, max_bytes"
            " FROM partitions JOIN streams ON streams.name = partitions.stream WHERE partitions.name = ?",
            partition.name,
        )
        if found is None:
            raise StreamMissing(f"There is no partition {partition.name} in {self._path}.")
        return _Row(*found)

    def _only_new(self, row: _Row, publisher: str, messages: Sequence[bytes], ids: Sequence[int]) -> Sequence[bytes]:
        known = self._one("SELECT highest_id FROM publishers WHERE partition_id = ? AND name = ?", row.id, publisher)
        new = bisect_right(ids, known[0]) if known else 0  # ids rise, so those known are the first ones
        if new < len(ids):
            self._connection.execute(
                "INSERT INTO publishers (partition_id, name, highest_id) VALUES (?, ?, ?)"
                " ON CONFLICT DO UPDATE SET highest_id = excluded.highest_id",
                (row.id, publisher, ids[-1]),
            )
        return messages[new:]

    def _insert(self, row: _Row, messages: Sequence[bytes]) -> _Row:
        now = max(self._now_ms(), row.last_timestamp_ms)  # time in a log never goes back, whatever the clock does
        self._connection.executemany(
            f"INSERT INTO {_table(row)} (offset, timestamp_ms, data) VALUES (?, {now}, ?)",  # noqa: S608
            enumerate(messages, row.next_offset),
        )
        row = row._replace(
            next_offset=row.next_offset + len(messages),
            bytes=row.bytes + sum(map(len, messages)),
            last_timestamp_ms=now,
        )
        self._connection.execute(
            "UPDATE partitions SET next_offset = ?, bytes = ?, last_timestamp_ms = ? WHERE id = ?",
            (row.next_offset, row.bytes, now, row.id),
        )
        return row

    def _trim(self, row: _Row, most: int) -> None:
        excess = self._excess(row, most)
        if excess.records:
            self._connection.execute(f"DELETE FROM {_table(row)} WHERE offset < ?", (excess.end,))  # noqa: S608
            left = (row.bytes - excess.bytes, row.id)
            self._connection.execute("UPDATE partitions SET bytes = ? WHERE id = ?", left)

    def _excess(self, row: _Row, most: int) -> _Excess:
        """Up to `most` of the oldest records, as far as age or size asks to drop them, but never the newest record."""
        oldest = self._now_ms() - row.max_age_seconds * 1000
        excess = _Excess(0, 0, 0)
        rows = self._connection.execute(
            f"SELECT offset, timestamp_ms, length(data) FROM {_table(row)}"  # noqa: S608
            " WHERE offset < ? ORDER BY offset LIMIT ?",
            (row.next_offset - 1, most),
        )
        for offset, timestamp_ms, size in rows:
            if timestamp_ms >= oldest and row.bytes - excess.bytes <= row.max_bytes:
                break
            excess = _Excess(excess.records + 1, excess.bytes + size, offset + 1)
        rows.close()
        return excess

    def _now_ms(self) -> int:
        return int(self._wall() * 1000)

    def _one(self, text: str, *args: object) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._connection.execute(text, args).fetchone()
        return row

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._errors():
            self._connection.execute("BEGIN IMMEDIATE")  # not deferred: a read that turns into a write cannot wait
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None) or sqlite3.SQLITE_ERROR
            passing = isinstance(error, sqlite3.OperationalError) and code & 0xFF not in _REFUSALS
            raise (LogError if passing else LogRefused)(f"{self._path}: {error}") from error


def _make_private(path: Path) -> None:
    """Make a missing file for its owner only: it holds personal data. SQLite gives its side files the same mode."""
    try:
        if not path.exists():
            path.touch(0o600)
    except OSError as error:
        raise LogRefused(f"The embedded log {path.absolute()} cannot be made: {error.strerror}.") from error


def _table(row: _Row) -> str:
    return f"records_{row.id}"
