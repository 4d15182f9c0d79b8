"""The sync: a committed event becomes one HTTP request to the system that must hear of it.

plan finds the row, act asks the event's dispatcher for a request and has it sent. When an event may be sent, and how
its outcome is kept, is the engine's; what is sent where is `dispatchers/`; how it is sent is `processors/_http`.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING

from models.outbox import DUE, TRACEPARENT
from processors._http import errors
from processors._http.answer import Answer, SendFailed
from processors._http.request import RequestDescription
from processors._settings import Settings
from processors.sync.dispatchers import DISPATCHERS
from processors.sync.request import Dispatcher, NotConfigured
from streams.errors import Reject, Retry
from streams.lanes import Lanes
from streams.message import Message
from streams.processor import Claim, Gate, NewRow, RowRef, RowTable
from streams.sql import Row, Sql

if TYPE_CHECKING:
    from processors._http.sender import Sender

NAME = "sync"
EVENT = "outbox.event"
UNKNOWN_LANE = "(unknown event)"
AGENT = f"afluente/{version('afluente')}"

TABLE = RowTable(
    name="outbox_events",
    key=None,
    error="last_error",
    insert={},
    read=("event_name", "payload", "traceparent", "created_at"),
    due={"postgresql": DUE, "sqlite": DUE},
    known=("event_name",),
    as_text=frozenset({"payload", "created_at"}),
)


def event_message(row: Row) -> Message:
    """The relay's hint that an event is due: its id and nothing else, for the row decides."""
    return Message(str(row["id"]), EVENT, 1, row["attempts"] + 1, b"{}")


def row_id(message: Message) -> int:
    """The event that a message points at. Raises Reject."""
    if message.type != EVENT or message.version != 1:
        raise Reject("unknown_type", f"sync knows no message of type {message.type[:50]!r} version {message.version}")
    if not message.id.isascii() or not message.id.isdigit() or len(message.id) > 18:
        raise Reject("bad_message", "the id of an outbox.event message is the id of a row")
    return int(message.id)


class Sync:
    """See `streams.processor.RowProcessor`."""

    name = NAME
    table = TABLE
    reports_failures = False
    """A failed event is seen in the table and among the dead letters: so its owners decided."""

    def __init__(
        self, stream: str, settings: Settings, sender: "Sender", dispatchers: Mapping[str, Dispatcher] = DISPATCHERS
    ) -> None:
        self.stream = stream
        self._settings, self._sender, self._dispatchers = settings, sender, dispatchers

    def lanes(self, width: int) -> Lanes:
        """One for each system."""
        return Lanes(self._lane, width)

    def _lane(self, row: Row) -> str:
        dispatcher = self._dispatchers.get(row["event_name"])
        return UNKNOWN_LANE if dispatcher is None else dispatcher.target

    # ---- plan

    def plan(self, message: Message) -> RowRef | NewRow:
        return RowRef(row_id(message))

    async def known(self, sql: Sql, rows: Sequence[tuple[NewRow, Row]]) -> None:
        """No message of this stream makes a row."""

    # ---- act

    async def act(self, claim: Claim, gate: Gate) -> Mapping[str, object]:
        """Send it once. Whatever goes wrong counts as one attempt, whether or not another try could help."""
        request = self._request(claim.row)
        try:
            answer = await self._sender.send(request, _headers(claim), gate)
        except SendFailed as error:
            text = errors.clean(str(error), request)
            raise Retry(text, fault=error.fault, in_doubt=error.in_doubt) from None
        if not request.success(answer.status):
            raise _refused(answer, request)
        return {}

    async def probe(self) -> None:
        """Each system is probed by a row of its own lane."""

    def _request(self, row: Row) -> RequestDescription:
        name = row["event_name"]
        dispatcher = self._dispatchers.get(name)
        if dispatcher is None:
            known = ", ".join(sorted(self._dispatchers))
            raise Retry(f"no dispatcher is registered for the event {name[:100]!r}; there are: {known}")
        try:
            return dispatcher.describe(row["payload"], self._settings)
        except NotConfigured as error:
            raise Retry(str(error)) from None


def _refused(answer: Answer, request: RequestDescription) -> Retry:
    wait = errors.retry_after(answer, datetime.now(UTC))
    return Retry(errors.clean(errors.refusal(answer), request), fault=errors.fault(answer.status), not_before=wait)


def _headers(claim: Claim) -> dict[str, str]:
    """By which a receiver drops repeats and puts events in order; the trace goes on as it came, for we record none."""
    headers = {
        "Idempotency-Key": str(claim.row_id),
        "Afluente-Event": claim.row["event_name"],
        "Afluente-Event-Created-At": _instant(claim.row["created_at"]),
        "Afluente-Attempt": str(claim.attempts),
        "User-Agent": AGENT,
    }
    context = claim.row["traceparent"]
    if context and TRACEPARENT.fullmatch(context):
        headers["traceparent"] = context
    return headers


def _instant(text: str) -> str:
    """A time as the database writes it, as RFC 3339 has it."""
    at = datetime.fromisoformat(text)
    return at.replace(tzinfo=at.tzinfo or UTC).astimezone(UTC).isoformat(timespec="microseconds")
