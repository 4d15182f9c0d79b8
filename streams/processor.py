"""The declaration of a processor: its name, its source, its limits, and the steps that are its own.

There are two kinds. A *transform* turns records into messages of another stream (`Transform`). A *row processor* brings
something about in the outside world for each row of a table, and its row decides everything (`RowProcessor`). Neither
publishes nor commits: they answer, the engine (`runtime.py`, `transforms.py`) does the rest.
"""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from streams.breaker import BreakerPolicy
from streams.dead_letters import DeadLetter
from streams.errors import LeaseOver
from streams.log import Partition, Record
from streams.message import Message
from streams.recovery import RecoveryPolicy
from streams.sql import Row, Sql


def _boot_clock() -> Callable[[], float]:
    """Seconds that also pass while the machine is suspended: a lease goes on in the database meanwhile."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic if clock is None else lambda: time.clock_gettime(clock)


clock = _boot_clock()


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one process. Times in seconds. `settings.check_lease` refuses combinations that break the protocol."""

    turn_records: int = 300
    slots: int = 16
    in_doubt: int = 16
    recovery: RecoveryPolicy = RecoveryPolicy()
    breaker: BreakerPolicy = BreakerPolicy()
    act_timeout: float = 60.0
    reply_timeout: float = 15.0
    commit_allowance: float = 30.0
    lease: float = 120.0
    idle_look: float = 3.0
    visibility: float = 60.0
    database_away: float = 120.0
    rate_per_second: float | None = None
    relay_batch: int = 500
    relay_poll: float = 1.0
    repeat_lag_limit: int = 1000

    @property
    def reserve(self) -> float:
        """What must be left of a lease when the final dot is written: the reply and the commit still need time."""
        return self.reply_timeout + self.commit_allowance


# ---- row processors


@dataclass(frozen=True, slots=True)
class RowTable:
    """A table whose rows live by the protocol: where they are kept and which columns are the application's.

    `key` is the column that says what is the same thing, None where that is the id. `insert` maps the columns of a new
    row to PostgreSQL types; `read` is what a claim returns, `as_text` those of it that come as the database's own
    text, `known` what `RowProcessor.known` is shown; `due` is the relay's order, by dialect, exactly as the index has
    it (without `queued_until` where another index has that); `stored` are the columns that an act may change together
    with `sent`; `sent_times` get the time of sending.
    """

    name: str
    key: str | None
    error: str
    insert: Mapping[str, str]
    read: tuple[str, ...]
    due: Mapping[str, str]
    known: tuple[str, ...] = ()
    stored: Mapping[str, str] = field(default_factory=dict)
    sent_times: tuple[str, ...] = ("sent_at",)
    as_text: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class NewRow:
    """A first message: this row, unless one with its key exists. `payload` saves the act from building it again."""

    key: str
    values: Mapping[str, object]
    payload: object = None


@dataclass(frozen=True, slots=True)
class RowRef:
    """Any later message: a hint to look at the row with this id. It may never insert one."""

    row_id: int


@dataclass(slots=True)
class Claim:
    """A row that this process holds. `row` has the columns of `RowTable.read`; None each if there is a `payload`."""

    row_id: int
    claim_no: int
    attempts: int
    key: str | None
    row: Row
    payload: object = None


class Gate:
    """What an act passes right before the point after which its outcome is in doubt (mail: the final dot).

    `wait` takes one of the process's in-doubt permits; the engine gives it back once the outcome is committed.
    `check` is the last instruction before the write, with nothing awaited in between.
    """

    __slots__ = ("_acquire", "_deadline", "deadline", "holds_permit", "limited", "passed")

    def __init__(self, deadline: float, last_moment: float, acquire: Callable[[], Awaitable[object]] | None) -> None:
        self.deadline = deadline
        """When the act must be over, in the event loop's time."""
        self._deadline = last_moment
        self._acquire = acquire
        self.limited = acquire is not None
        """Whether `wait` may have to wait at all: only where fewer may be in doubt than are under way."""
        self.holds_permit = False
        self.passed = False

    async def wait(self) -> None:
        if self._acquire is not None and not self.holds_permit:
            await self._acquire()
            self.holds_permit = True

    def check(self) -> None:
        """Raise `LeaseOver` when the lease may end before the outcome can be recorded."""
        if clock() >= self._deadline:
            raise LeaseOver("the lease is nearly over: nothing was sent")
        self.passed = True


class RowProcessor(Protocol):
    """plan and act of a processor whose rows decide; record is the engine's (`rows.py`)."""

    name: str
    stream: str
    table: RowTable
    reports_failures: bool
    """Whether a final failure goes to Sentry."""

    def plan(self, message: Message) -> NewRow | RowRef:
        """Say which row a message is about. Pure. Raises Reject for a message that can never become one."""
        ...

    async def known(self, sql: Sql, rows: Sequence[tuple[NewRow, Row]]) -> None:
        """In plan's transaction: first messages whose key had a row already."""
        ...

    async def act(self, claim: Claim, gate: Gate) -> Mapping[str, object]:
        """Bring it about, by `gate.deadline`. Return columns of `RowTable.stored` that changed (mostly none), or what
        `Records.record` needs.

        Raises Retry, Reject or LeaseOver; anything else counts as Retry.
        """
        ...

    async def probe(self) -> None:
        """Is the provider back? Raises anything when it is not. Touches no row."""
        ...


@runtime_checkable
class Records(Protocol):
    """A row processor whose done rows bring further rows with them, in the very transaction that records them."""

    async def record(self, sql: Sql, done: Sequence[tuple[Claim, Mapping[str, object]]]) -> None:
        """Write what belongs to these claims and what their acts returned; all of it commits with `sent`, or nothing.

        Each row comes here once in its life: it is locked, and one that is sent already is left out. What is raised
        (but for an absent database) rolls back and makes a failed attempt of that row alone; Retry and Reject mean
        what they mean in an act.
        """
        ...


# ---- transforms


@dataclass(slots=True)
class Transformed:
    """What one record becomes: per target partition the (publishing id, encoded message) in rising order."""

    outgoing: Sequence[Sequence[tuple[int, bytes]]]
    facts: Any = None
    """Whatever `Transform.record` needs to count it."""


class Transform(Protocol):
    """A processor that has no act: records in, messages out, exactly once by publishing ids."""

    name: str
    stream: str
    target: str

    def publisher_name(self, partition: int, epoch: int) -> str:
        """The name under which a partition of the source publishes; epoch and the code's version are part of it."""
        ...

    def transform(self, message: Message, offset: int, partitions: int) -> Iterator[Transformed | None]:
        """Yield None whenever the loop may turn, and at last the result. Raises Reject for the whole record."""
        ...

    async def record(
        self, sql: Sql, records: Sequence[Record], partition: Partition, results: Sequence[Transformed]
    ) -> Sequence[DeadLetter]:
        """Count the results of these records, where the offset moves; return what is to be laid to rest."""
        ...
