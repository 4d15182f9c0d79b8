"""Repayments: a request becomes a new charge, the original's charges are cancelled, and one transaction says so.

plan finds or makes the request's row. act validates (`validation.py`) and calls the gateway (`charging.py`); it saves
nothing, so whoever acts again finds at the gateway how far the last one came. record is `transaction.py`, together with
the engine's outcome. docs/repayments.md has the order of all this and what it is for.
"""

import asyncio
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from models.outbox import TRACEPARENT
from models.repayment_requests import InvalidRequest, RepaymentRequest
from models.repayments import DUE
from processors._repayment_request import TYPE, VERSION
from processors.repayments import charging, transaction, validation
from processors.repayments.charging import Seen
from processors.repayments.gateway import Calls, Charge, Gateway, Refused
from processors.repayments.transaction import Done
from streams.database import is_away
from streams.errors import Reject, Retry
from streams.lanes import Lanes
from streams.message import Message
from streams.processor import Claim, Gate, NewRow, RowRef, RowTable
from streams.sql import Database, Row, Sql

NAME = "repayments"
RETRY = "repayment.retry"
LANE = "gateway"
AGENT = f"afluente/{version('afluente')}"

TABLE = RowTable(
    name="repayment_requests",
    key="reference",
    error="last_error",
    insert={"body": "text", "original_payment_id": "bigint", "traceparent": "text"},
    read=("body", "traceparent"),
    due={"postgresql": DUE, "sqlite": DUE},
    known=("body",),
)

log = structlog.get_logger(__name__)


def retry_message(row: Row) -> Message:
    """The relay's hint that a request is due again: its row's id and nothing else."""
    return Message(str(row["id"]), RETRY, 1, row["attempts"] + 1, b"{}")


class Repayments:
    """See `streams.processor.RowProcessor` and `streams.processor.Records`."""

    name = NAME
    table = TABLE
    reports_failures = True

    def __init__(self, stream: str, gateway: Gateway, engine: AsyncEngine, away_seconds: float) -> None:
        self.stream = stream
        self._gateway, self._database = gateway, Database(engine, away_seconds)

    def lanes(self, width: int) -> Lanes:
        """One: the gateway. Its breaker is probed by a row."""
        return Lanes(lambda row: LANE, width)

    # ---- plan

    def plan(self, message: Message) -> NewRow | RowRef:
        if (message.type, message.version) == (RETRY, 1):
            if not message.id.isascii() or not message.id.isdigit() or len(message.id) > 18:
                raise Reject("bad_message", f"the id of a {RETRY} message is the id of a row")
            return RowRef(int(message.id))
        if (message.type, message.version) != (TYPE, VERSION):
            says = f"repayments knows no message of type {message.type[:50]!r} version {message.version}"
            raise Reject("unknown_type", says)
        try:
            request = RepaymentRequest.from_json(message.body)
        except InvalidRequest as error:
            raise Reject(error.reason, str(error)) from None
        if message.id != request.reference:
            raise Reject("bad_message", "the id of a request's message is its reference")
        return NewRow(request.reference, _columns(request, message.headers.get("traceparent")))

    async def known(self, sql: Sql, rows: Sequence[tuple[NewRow, Row]]) -> None:  # noqa: ARG002 - of the Protocol
        """A reference that came before: the first request counts, and one that says something else is told of."""
        for new, row in rows:
            if new.values["body"] != row["body"]:
                log.warning("repayment.reference_taken", row_id=row["id"], reference=new.key)

    # ---- act

    async def act(self, claim: Claim, gate: Gate) -> Mapping[str, object]:
        """Bring it about at the gateway, by `gate.deadline`."""
        request, seen = _request(claim.row), Seen()
        calls = self._gateway.calls(gate, claim.row["traceparent"])
        try:
            async with asyncio.timeout_at(gate.deadline):
                return await self._act(claim, request, calls, seen)
        except TimeoutError:
            raise Retry(seen.tell("the time of one attempt was over"), in_doubt=True) from None
        except Retry as error:
            raise Retry(seen.tell(error.error), error.fault, error.in_doubt, error.not_before) from None
        except Refused as error:
            raise Retry(seen.tell(str(error))) from None

    async def _act(self, claim: Claim, request: RepaymentRequest, calls: Calls, seen: Seen) -> Mapping[str, object]:
        first_try = claim.claim_no == 1
        try:
            case = await self._database.patiently(lambda sql: validation.look_up(sql, claim.row_id, request))
        except Reject as error:
            raise error if first_try else await self._withdrawn(request, calls, error) from None
        if case.done:
            return {}
        found = await charging.find_or_create(request, case, calls, seen, first_try=first_try)
        written = await self._written(found)
        for charge_id, request_id in written.items():
            if request_id != claim.row_id:
                says = f"reference: its charge {charge_id} is that of another payment"
                raise Reject(validation.REFERENCE_TAKEN, says)
        charge = seen.charge = await charging.keep_one(found, written, calls)
        charging.check(charge, request, case)
        await charging.cancel_original(case, calls, seen)
        return {"done": Done(request, case, charge)}

    async def _withdrawn(self, request: RepaymentRequest, calls: Calls, why: Reject) -> Reject:
        """Whatever is written down stays: another payment's charge, or ours that somebody else was faster to record."""
        found = await calls.find(request.reference)
        written = await self._written(found)
        return await charging.withdrawn([charge for charge in found if charge.id not in written], calls, why)

    async def _written(self, found: Sequence[Charge]) -> dict[str, int | None]:
        return await self._database.patiently(lambda sql: validation.written(sql, found)) if found else {}

    async def probe(self) -> None:
        """The gateway is probed by a row of its lane."""

    # ---- record

    async def record(self, sql: Sql, done: Sequence[tuple[Claim, Mapping[str, Any]]]) -> None:
        """Write each; one that cannot be written names the charge that exists."""
        for claim, facts in done:
            if "done" not in facts:
                continue
            one: Done = facts["done"]
            try:
                await transaction.write(sql, claim.row_id, one, claim.row["traceparent"])
            except Exception as error:
                if is_away(error):
                    raise
                raise Retry(Seen(one.charge).tell(_why(error))) from error


def _columns(request: RepaymentRequest, traceparent: object) -> dict[str, object]:
    known = isinstance(traceparent, str) and TRACEPARENT.fullmatch(traceparent)
    return {
        "body": request.to_json().decode(),
        "original_payment_id": request.original_payment,
        "traceparent": traceparent if known else None,
    }


def _request(row: Row) -> RepaymentRequest:
    """The request of a row, which somebody may have edited since it was planned."""
    try:
        return RepaymentRequest.from_json(row["body"].encode())
    except InvalidRequest as error:
        raise Reject(error.reason, str(error)) from None


def _why(error: Exception) -> str:
    """Not the error's own text: a database's quotes the row."""
    if isinstance(error, Retry):
        return error.error
    rule = getattr(error, "constraint_name", None)
    return f"the repayment could not be written: {type(error).__name__}{f' ({rule})' if rule else ''}"
