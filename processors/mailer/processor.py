"""The mailer: a recipient's message becomes a row, and a row becomes one e-mail.

plan makes the row, act sends the mail, `known` counts recipients of a batch whose row belongs to another. When a row
may be sent, and how its outcome is kept, is the engine's; what SMTP does is `smtp.py`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import orjson

from models.dispatches import DUE, IMPORT_MAILABLE_TYPE
from models.registration import MAILABLE, InvalidRegistration, Registration, parse_registration
from processors.mailer import smtp
from processors.mailer.mail import BadAddress, Frame, message_id
from processors.mailer.mailable import Mailable, Rendered
from streams.errors import Reject, Retry
from streams.message import Message
from streams.processor import Claim, Gate, NewRow, RowRef, RowTable
from streams.sql import Row, Sql, recordset

NAME = "mailer"
RECIPIENT, RETRY = "recipient", "email.retry"

TABLE = RowTable(
    name="email_dispatches",
    key="idempotency_key",
    error="error_message",
    insert={
        "to": "text",
        "subject": "text",
        "content": "text",
        "mailable_type": "text",
        "meta": "json",
        "batch_id": "text",
        "batch_index": "int",
        "message_id": "text",
    },
    read=("subject", "content", "meta", "message_id"),
    known=("batch_id", "batch_index"),
    due=DUE,
    stored={"subject": "text", "content": "text"},
    sent_times=("sent_at", "dispatched_at"),
)


@dataclass(frozen=True, slots=True)
class Letter:
    """A mail before it is bytes: to whom, what they read, under which Message-ID."""

    address: str
    name: str
    message_id: str
    rendered: Rendered


class Transport(Protocol):
    """The part of `smtp.Pool` that the mailer needs."""

    async def send(self, sender: str, recipient: str, mail: bytes, gate: Gate, deadline: float) -> str: ...

    async def probe(self) -> None: ...


def retry_message(row: Row) -> Message:
    """The relay's hint that a row is due: its id and nothing else, for the row decides."""
    return Message(str(row["id"]), RETRY, 1, row["attempts"] + 1, b"{}")


def new_keys(message: Message) -> list[str]:
    """The key of the row that this message makes, unless there is one: none, if it is only a hint. Raises Reject."""
    if message.type == RETRY and message.version == 1:
        return []
    if message.type == RECIPIENT and message.version == 1:
        _recipient(message)
        return [message.id]
    raise _unknown(message)


class Mailer:
    """See `streams.processor.RowProcessor`."""

    name = NAME
    table = TABLE
    reports_failures = True

    def __init__(
        self,
        stream: str,
        mailable: Mailable,
        frame: Frame,
        transport: Transport,
        *,
        envelope_from: str,
        message_id_domain: str,
        permanent_5xx_is_final: bool = False,
    ) -> None:
        self.stream = stream
        self._mailable, self._frame, self._transport = mailable, frame, transport
        self._envelope_from, self._domain = envelope_from, message_id_domain
        self._permanent_is_final = permanent_5xx_is_final

    # ---- plan

    def plan(self, message: Message) -> NewRow | RowRef:
        if message.type == RETRY and message.version == 1:
            return _row_ref(message)
        if message.type == RECIPIENT and message.version == 1:
            return self._new_row(message)
        raise _unknown(message)

    def _new_row(self, message: Message) -> NewRow:
        registration, batch_id, index = _recipient(message)
        letter = self._letter(registration, message_id(message.id, self._domain))
        values = {
            "to": registration.agent_email,
            "subject": letter.rendered.subject,
            "content": letter.rendered.html,
            "mailable_type": IMPORT_MAILABLE_TYPE,
            "meta": registration._asdict(),
            "batch_id": batch_id,
            "batch_index": index,
            "message_id": letter.message_id,
        }
        return NewRow(message.id, values, letter)

    def _letter(self, registration: Registration, mail_id: str) -> Letter:
        rendered = self._mailable.render(registration._asdict())
        return Letter(registration.agent_email, registration.agent_name, mail_id, rendered)

    async def known(self, sql: Sql, rows: Sequence[tuple[NewRow, Row]]) -> None:
        """A recipient whose row came with another item is a duplicate; the same item again is a redelivery."""
        duplicates = [
            {"batch_id": new.values["batch_id"], "item_index": new.values["batch_index"], "key": new.key}
            for new, row in rows
            if (row["batch_id"], row["batch_index"]) != (new.values["batch_id"], new.values["batch_index"])
        ]
        if duplicates:
            source = recordset(sql.dialect, "$1", "x", {"batch_id": "text", "item_index": "int", "key": "text"})
            await sql.fetch(
                f"""INSERT INTO batch_duplicates (batch_id, item_index, idempotency_key)
                SELECT batch_id, item_index, "key" FROM {source} WHERE true ON CONFLICT DO NOTHING""",
                orjson.dumps(duplicates).decode(),
            )

    # ---- act

    async def act(self, claim: Claim, gate: Gate) -> Mapping[str, object]:
        """Send it. Returns subject and content where the row has others, so that it says what was sent."""
        letter = claim.payload if isinstance(claim.payload, Letter) else self._from_row(claim)
        mail = self._encode(letter)
        try:
            await self._transport.send(self._envelope_from, letter.address, mail, gate, gate.deadline)
        except smtp.Refused as error:
            raise self._refused(error) from error
        except smtp.SetupFault as error:
            raise Retry(str(error), fault=error.kind) from error
        except smtp.NotDelivered as error:
            raise Retry(str(error)) from error
        except smtp.OutcomeUnknown as error:
            raise Retry(str(error), in_doubt=True) from error
        return {} if claim.payload is not None else _changes(claim.row, letter.rendered)

    async def probe(self) -> None:
        await self._transport.probe()

    def _from_row(self, claim: Claim) -> Letter:
        """Every later attempt builds its mail from the row."""
        try:
            registration = parse_registration(claim.row["meta"])
        except InvalidRegistration as error:
            raise Reject("invalid_registration", f"the row's meta cannot be mailed: {error}") from error
        mail_id = claim.row["message_id"] or message_id(claim.key or registration.key, self._domain)
        return self._letter(registration, mail_id)

    def _encode(self, letter: Letter) -> bytes:
        subject, text, html = letter.rendered
        try:
            return self._frame.encode(
                to=letter.address, name=letter.name, message_id=letter.message_id, subject=subject, text=text, html=html
            )
        except BadAddress as error:
            raise Reject(error.reason, str(error)) from error

    def _refused(self, error: smtp.Refused) -> Exception:
        """Whatever the code, it is tried again, as the owners asked; a setting makes 5xx final."""
        if error.code >= 500 and self._permanent_is_final:
            return Reject("refused", str(error))
        return Retry(str(error))


def _unknown(message: Message) -> Reject:
    known = f"type {message.type[:50]!r} version {message.version}"
    return Reject("unknown_type", f"the mailer knows no message of {known}")


def _row_ref(message: Message) -> RowRef:
    if not message.id.isascii() or not message.id.isdigit() or len(message.id) > 18:
        raise Reject("bad_message", "the id of an email.retry message is the id of a row")
    return RowRef(int(message.id))


def _recipient(message: Message) -> tuple[Registration, str | None, int | None]:
    """The registration, the batch and the index in it. Other programs may write to the stream: nothing is believed."""
    try:
        body = orjson.loads(message.body)
        mailable, batch_id, index, data = (body[name] for name in ("mailable", "batch", "index", "data"))
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise Reject(
            "bad_message", f"the body of a recipient message is not as it should be: {type(error).__name__}"
        ) from None
    if mailable != MAILABLE:
        raise Reject("unknown_mailable", "the mailer has no such kind of e-mail")
    if not (isinstance(batch_id, str) and len(batch_id) <= 64 and type(index) is int and 0 <= index < 2**31):
        raise Reject("bad_message", "batch or index of a recipient message is not as it should be")
    try:
        registration = parse_registration(data)
    except InvalidRegistration as error:
        raise Reject("invalid_registration", str(error)) from error
    if registration.key != message.id:
        raise Reject("wrong_key", "the message's id is not the idempotency key of its registration")
    return registration, batch_id, index


def _changes(row: Row, rendered: Rendered) -> Mapping[str, object]:
    return {
        name: value for name, value in (("subject", rendered.subject), ("content", rendered.html)) if row[name] != value
    }
