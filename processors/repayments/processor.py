"""Repayments: a request becomes a new charge, the original's charges are cancelled, and one transaction says so.

plan finds or makes the request's row. act validates, and calls the gateway: look the reference up, create if there is
nothing, look up again, cancel what is to be cancelled; it saves nothing, so whoever acts again finds at the gateway how
far the last one came. record is `transaction.py`, together with the engine's outcome. docs/repayments.md has the order
and what it is for.
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
from processors.repayments import transaction, validation
from processors.repayments.gateway import Calls, Charge, Gateway, Order, Part, Refused, merged
from processors.repayments.transaction import Done
from processors.repayments.validation import Case
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
            raise Retry(seen.tell("the time of one attempt was over")) from None
        except Retry as error:
            raise Retry(seen.tell(error.error), error.fault, error.in_doubt, error.not_before) from None
        except Refused as error:
            raise Retry(seen.tell(str(error))) from None

    async def _act(self, claim: Claim, request: RepaymentRequest, calls: Calls, seen: "Seen") -> Mapping[str, object]:
        try:
            case = await self._database.patiently(lambda sql: validation.look_up(sql, claim.row_id, request))
        except Reject as error:
            raise await _withdrawn(claim, request, calls, error) from None
        if case.done:
            return {}
        found = await _found_or_created(claim, request, case, calls)
        charge = seen.charge = await self._the_one(found, request, calls)
        _check(charge, request, case)
        await _cancel_original(case, calls, seen)
        return {"done": Done(request, case, charge)}

    async def _the_one(self, found: Sequence[Charge], request: RepaymentRequest, calls: Calls) -> Charge:
        """Of several charges the one to keep; the others are cancelled. One that is written down already is kept."""
        kept, *younger = found
        if younger:
            rows = await self._database.patiently(
                lambda sql: sql.fetch("SELECT gateway_id FROM payments WHERE reference = $1", request.reference)
            )
            written = {row["gateway_id"] for row in rows}
            kept, *younger = sorted(found, key=lambda charge: (charge.id not in written, charge.age))
        for charge in younger:
            await _cancel(charge, calls)
        return kept

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


class Seen:
    """What an act knows of the gateway when it fails: both charges are named then, so that none is lost track of."""

    def __init__(self, charge: Charge | None = None) -> None:
        self.charge = charge
        self.cancelling: str | None = None
        """The original's charge that is being cancelled."""

    def tell(self, error: str) -> str:
        """The error, and what exists."""
        told = [error]
        if self.cancelling is not None:
            told.append(f"the original's charge {self.cancelling} is not cancelled")
        if self.charge is not None:
            told.append(f"the new charge {self.charge.id} exists")
        return "; ".join(told)


# ---- the steps of an act


async def _found_or_created(claim: Claim, request: RepaymentRequest, case: Case, calls: Calls) -> Sequence[Charge]:
    """The charges of this request, mostly one, at least one; the one to keep first.

    What the request says of days and sums counts until a charge is created; then there is no way back.
    """
    problem = validation.problem(request, validation.today())
    if problem is not None and claim.claim_no == 1:
        raise problem
    found = await calls.find(request.reference)
    if not found:
        if problem is not None:
            raise problem
        await _check_at_gateway(case, calls)
        created = await _create(request, case, calls)
        found = merged(await calls.find(request.reference), created)
    return found


async def _check_at_gateway(case: Case, calls: Calls) -> None:
    """Before anything is created: has the original been paid, and our tables do not know yet?"""
    for charge_id in case.original.open_charges if case.original is not None else ():
        part = await calls.look(charge_id)
        if part is not None and not part.is_open:
            raise Reject("paid_already", f"original_payment: its charge {charge_id} is {part.status} at the gateway")


async def _create(request: RepaymentRequest, case: Case, calls: Calls) -> Part:
    order = Order(
        request.reference,
        case.customer,
        request.billing_type,
        request.value,
        request.due_date,
        max(1, len(request.installments)),
    )
    try:
        return await calls.create(order)
    except Refused as error:
        raise Reject("refused_by_gateway", str(error)) from None


def _check(charge: Charge, request: RepaymentRequest, case: Case) -> None:
    """Is the charge what was asked for? A plan's parts may not be there all at once."""
    wanted = max(1, len(request.installments))
    if len(charge.parts) != wanted:
        raise Retry(f"charge {charge.id} has {len(charge.parts)} of {wanted} parts at the gateway")
    alike = {(part.customer, part.billing_type) for part in charge.parts} == {(case.customer, request.billing_type)}
    if charge.total != request.value or not alike:
        raise Retry(f"charge {charge.id} has this reference, and is for another amount, customer or billing type")


async def _cancel(charge: Charge, calls: Calls) -> None:
    for part in charge.parts:
        await calls.cancel(part.id)


async def _cancel_original(case: Case, calls: Calls, seen: Seen) -> None:
    """Only now, for the new charge exists; and what is cancelled already stays so."""
    for charge_id in case.original.open_charges if case.original is not None else ():
        seen.cancelling = charge_id
        await calls.cancel(charge_id)
    seen.cancelling = None


async def _withdrawn(claim: Claim, request: RepaymentRequest, calls: Calls, why: Reject) -> Reject:
    """A request that may not go on: what an earlier try of it has created is cancelled, so that nobody pays twice."""
    if claim.claim_no == 1:
        return why
    found = await calls.find(request.reference)
    for charge in found:
        try:
            await _cancel(charge, calls)
        except Refused as error:
            return Reject(why.reason, f"{why.error}; its charge {charge.id} exists and cannot be cancelled: {error}")
    ids = ", ".join(charge.id for charge in found)
    return Reject(why.reason, f"{why.error}; its charge {ids} is cancelled" if found else why.error)
