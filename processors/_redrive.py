"""Dead letters tried again, one after another, at a pace; stopped at any moment, the same call goes on.

A letter of a row makes its row due; a letter of a record that never became a row has its original bytes published to
its stream once more. What is redriven is not open any more, so nothing is redriven twice by going on.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from models.audits import DISPATCH_TYPE, EVENT_TYPE, REQUEST_TYPE
from models.tables import EmailDispatch, OutboxEvent, RepaymentRequestRow
from processors._audit import who
from processors._forecast import Forecast, NewKeys
from streams.database import dialect, driver_connection
from streams.errors import LogError, LogRefused, StreamMissing
from streams.log import MAX_MESSAGE_BYTES, Log, Publisher
from streams.message import Message
from streams.pace import Pace
from streams.processor import clock
from streams.redrive import SENTENCES, Filter, Letters, State
from streams.sql import Row, Sql, sql

DISPATCHES, EVENTS = str(EmailDispatch.__tablename__), str(OutboxEvent.__tablename__)
REQUESTS = str(RepaymentRequestRow.__tablename__)
TABLES: Mapping[str, str | None] = {DISPATCHES: "batch_id", EVENTS: None, REQUESTS: None}
"""The tables whose rows have dead letters, and the column of the batch that a row came with."""

AUDITED = {DISPATCHES: DISPATCH_TYPE, EVENTS: EVENT_TYPE, REQUESTS: REQUEST_TYPE}

REDRIVE = "redrive"
"""Property that tells the splitter whose letter a registration is (`processors/splitter/split.py`)."""

LOCK_NOT_AVAILABLE = "55P03"


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be redriven, how, and for whom; `per_second` None is as fast as it goes."""

    letters: Filter
    by: str
    per_second: float | None = None
    include_unknown: bool = False


@dataclass(slots=True)
class Redriven:
    """What came of it: so many redriven, so many not and why, so many not looked at because it was stopped, or because
    the log was away."""

    done: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    left: int = 0
    log_away: LogError | LogRefused | None = None


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a redrive would do: so many letters, of which `dead` would die again; so many mails, so many events sent, so
    many requests for repayments tried."""

    letters: int
    dead: int
    mails: int
    events: int
    requests: int
    refused: Counter[str]


class Stream:
    """Publishing to the streams that letters came from; opened when it is first needed, for rows need no log."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._opened = False
        self._publishers: dict[tuple[str, int], Publisher] = {}

    async def publish(self, stream: str, partition: int, data: bytes) -> None:
        """Return when it is confirmed. Raises StreamMissing, and other errors of a log."""
        if not self._opened:
            await self._log.open()
            self._opened = True
        if (stream, partition) not in self._publishers:
            partitions = await self._log.partitions(stream)
            if partition >= len(partitions):
                raise StreamMissing(f"{stream} has no partition {partition}")
            self._publishers[stream, partition] = await self._log.publisher(partitions[partition])
        await self._publishers[stream, partition].publish([data])

    async def close(self) -> None:
        """Let go of it."""
        for publisher in self._publishers.values():
            await publisher.close()
        await self._log.close()


# ---- doing it


class Redrive:
    """One run. `tell` hears of each letter: its id, and why it was not redriven (None: it was)."""

    def __init__(
        self, engine: AsyncEngine, stream: Stream, wish: Wish, tell: Callable[[int, str | None], object]
    ) -> None:
        self._engine, self._stream, self._wish, self._tell = engine, stream, wish, tell
        self._pace = Pace(wish.per_second)
        self._sum = Redriven()

    async def run(self, stop: asyncio.Event) -> Redriven:
        """Every letter that is meant and open now, the oldest first, until `stop`: the one under way is finished."""
        found = await candidates(self._engine, self._wish.letters)
        self._sum.left = len(found)
        try:
            for letter_id, state in found:
                reason = _why_not(state, self._wish.include_unknown)
                if reason is None:
                    if not await self._may_go_on(stop):
                        break
                    reason = await self._one(letter_id)
                self._count(letter_id, reason)
        except (LogError, LogRefused) as error:
            self._sum.log_away = error
        return self._sum

    async def _may_go_on(self, stop: asyncio.Event) -> bool:
        """Wait for the next one's time; False when it was stopped meanwhile."""
        while not stop.is_set() and not self._pace.grant(1, clock()):
            await asyncio.wait([stopped := asyncio.ensure_future(stop.wait())], timeout=self._pace.wait(clock()))
            stopped.cancel()
        return not stop.is_set()

    def _count(self, letter_id: int, reason: str | None) -> None:
        self._sum.left -= 1
        if reason is None:
            self._sum.done += 1
        else:
            self._sum.refused[reason] += 1
        self._tell(letter_id, reason)

    async def _one(self, letter_id: int) -> str | None:
        async with driver_connection(self._engine) as connection:
            database = sql(connection, dialect(self._engine))
            letters = Letters(database, TABLES)
            letter = await letters.one(letter_id)
            if letter is None:
                return "it does not exist any more"
            if letter["row_id"] is not None:
                return await self._row(database, letters, letter)
            data = await _bytes_again(database, letters, letter)
            if data is None or len(data) > MAX_MESSAGE_BYTES:
                return "its bytes are not there" if data is None else "it is too large to be published"
            if not await letters.begin(letter_id, self._wish.by):
                return SENTENCES["redriven"]
        return await self._record(letter, data)

    async def _row(self, database: Sql, letters: Letters, letter: Row) -> str | None:
        try:
            async with database.transaction():
                if database.dialect == "postgresql":
                    await database.fetch("SET LOCAL lock_timeout = '3s'")
                state = await letters.retry_row(letter, self._wish.by, self._wish.include_unknown)
                if state is None:
                    kind = AUDITED[letter["table_name"]]
                    await database.fetch(_AUDIT, who("redrive", self._wish.by), kind, letter["row_id"])
        except Exception as error:
            if getattr(error, "sqlstate", None) != LOCK_NOT_AVAILABLE:
                raise
            return "somebody has locked its row"
        return SENTENCES[state] if state is not None else None

    async def _record(self, letter: Row, data: bytes) -> str | None:
        """Published and confirmed first, then marked: a kill in between publishes twice, and keys absorb that."""
        try:
            await self._stream.publish(letter["source_stream"], letter["source_partition"], data)
        except StreamMissing as error:
            return str(error)
        async with driver_connection(self._engine) as connection:
            await Letters(sql(connection, dialect(self._engine)), TABLES).done(letter["id"], self._wish.by)
        return None


_AUDIT = """UPDATE audits SET tags = $1
    WHERE id = (SELECT max(id) FROM audits WHERE auditable_type = $2 AND auditable_id = $3)"""
"""The row is ours until the commit, so its last audit is that of our change; the trigger cannot know for whom."""


async def candidates(engine: AsyncEngine, wanted: Filter) -> list[tuple[int, State]]:
    """The letters that are meant at this moment; those that come later are none of them."""
    async with driver_connection(engine) as connection:
        rows = await Letters(sql(connection, dialect(engine)), TABLES).states(wanted)
    return [(row["id"], row["state"]) for row in rows]


def _why_not(state: State, include_unknown: bool) -> str | None:
    if state == "open" or (state == "held" and include_unknown):
        return None
    return SENTENCES[state]


async def _bytes_again(database: Sql, letters: Letters, letter: Row) -> bytes | None:
    """What to publish: the record as it was; a registration as a slice of its own, in its old place in the batch."""
    body = await letters.body(letter["id"])
    if body is None or letter["item_index"] is None:
        return body
    batch, index = letter["batch_id"], letter["item_index"]
    rows = await database.fetch("SELECT total FROM import_batches WHERE batch_id = $1", batch)
    total = max(rows[0]["total"] if rows else 0, index + 1)
    headers: dict[str, str | int] = {"batch": batch, "total": total, "first": index, REDRIVE: letter["id"]}
    return Message(f"{batch}/{index}", "import", 1, 1, b"[" + body + b"]", headers).encode()


# ---- saying before what would be done


async def forecast(engine: AsyncEngine, wish: Wish, new_keys: Mapping[str, NewKeys]) -> Outlook:
    """How many mails would follow. `new_keys` has the processors that read records."""
    found = await candidates(engine, wish.letters)
    refused = Counter(reason for _, state in found if (reason := _why_not(state, wish.include_unknown)) is not None)
    rows: Counter[str] = Counter()
    async with engine.connect() as look, driver_connection(engine) as connection:
        await look.execution_options(isolation_level="AUTOCOMMIT")
        database: Any = sql(connection, dialect(engine))
        letters, records = Letters(database, TABLES), Forecast(look)
        for letter_id, state in found:
            if _why_not(state, wish.include_unknown) is not None:
                continue
            letter = await letters.one(letter_id)
            if letter is None:
                continue
            if letter["row_id"] is not None:
                rows[letter["table_name"]] += 1
            else:
                data = await _bytes_again(database, letters, letter)
                keys = new_keys.get(letter["processor"], lambda _: [])
                await records.add(keys, [data or b""])
    letters_in_all, mails = rows.total() + records.records, rows[DISPATCHES] + records.mails
    return Outlook(letters_in_all, records.dead, mails, rows[EVENTS], rows[REQUESTS], refused)
