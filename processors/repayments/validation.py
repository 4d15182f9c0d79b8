"""Whether a request may be brought about: by what it says itself, and by what the tables say of its original payment.

Reads only. It is asked at the beginning of an act, not in plan: an answer of an earlier time would be no answer, for a
payment can be paid while its request waits for a slot or for its next attempt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone

import orjson

from models.repayment_requests import InvalidRequest, RepaymentRequest, even_installments
from models.repayments import OPEN
from processors.repayments.gateway import Charge
from streams.errors import Reject
from streams.sql import Row, Sql, recordset

BRASILIA = timezone(timedelta(hours=-3))
"""Due dates are days there; it has no summer time any more."""


REFERENCE_TAKEN = "reference_taken"

MAY_CLOSE = (*OPEN, "cancelled")
"""A payment in one of these may become renegotiated. Who hears from the gateway that its charge is cancelled may say so
in the table before we do."""


@dataclass(frozen=True, slots=True)
class Original:
    """The payment that is split anew. `open_charges` are the gateway's ids of what is still to be paid of it."""

    id: int
    reference: str
    status: str
    gateway_id: str | None
    open_charges: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A request that may be brought about. `done`: it has been, long ago."""

    customer: str
    product_slug: str | None
    original: Original | None
    done: bool = False


def today() -> date:
    """The day in Brasilia."""
    return datetime.now(UTC).astimezone(BRASILIA).date()


# ---- what it says itself


def problem(request: RepaymentRequest, day: date) -> Reject | None:
    """Why the gateway could not make such a charge on this day, None if it can. Pure."""
    if request.due_date < day:
        return Reject("past_due_date", f"due_date: {request.due_date} lies before {day}")
    parts = request.installments
    if not parts:
        return None
    total = sum(part.value for part in parts)
    if total != request.value:
        return Reject("installments_do_not_sum_up", f"installments: {total} in all, not {request.value}")
    if parts[0].due_date != request.due_date:
        return Reject("installments_not_offered", "installments: the first must be due on due_date")
    return _not_as_the_gateway_splits(request)


def cancelled(case: Case) -> Reject | None:
    """A payment that is cancelled is not split anew; unless it was we who cancelled it, when the new charge exists."""
    if case.original is None or case.original.status != "cancelled":
        return None
    return Reject("cancelled_already", f"original_payment: {case.original.id} is cancelled")


def _not_as_the_gateway_splits(request: RepaymentRequest) -> Reject | None:
    """It takes a count and a total, and no list: what it would make of them has to be what was asked for."""
    try:
        offered = even_installments(request.value, len(request.installments), request.due_date)
    except InvalidRequest as error:
        return Reject("installments_not_offered", str(error))
    for wanted, part in zip(request.installments, offered, strict=True):
        if wanted != part:
            return Reject(
                "installments_not_offered",
                f"installments: the gateway makes number {part.number} {part.value}, due on {part.due_date}",
            )
    return None


# ---- what the tables say


async def look_up(sql: Sql, request_id: int, request: RepaymentRequest) -> Case:
    """The case of a request. Raises Reject."""
    if request.original_payment is None:
        case = Case(request.customer or "", request.product_slug, None, await _is_done(sql, request_id))
        if not case.done:
            await _check_reference(sql, request_id, request)
        return case
    rows = await sql.fetch("SELECT * FROM payments WHERE id = $1", request.original_payment)
    if not rows:
        raise Reject("unknown_payment", f"original_payment: there is no payment {request.original_payment}")
    [payment] = rows
    original = await _original(sql, payment)
    # asked last: who finds the original renegotiated by this very request finds the request done as well
    done = await _is_done(sql, request_id)
    if not done:
        await _check_reference(sql, request_id, request)
        _check_payment(payment, request)
        await _check_others(sql, request_id, payment["id"])
    return Case(payment["customer"], request.product_slug or payment["product_slug"], original, done)


async def _is_done(sql: Sql, request_id: int) -> bool:
    return bool(await sql.fetch("SELECT id FROM repayments WHERE request_id = $1", request_id))


async def _check_reference(sql: Sql, request_id: int, request: RepaymentRequest) -> None:
    """At the gateway a reference is how we know our charge again: one of another payment would be taken for it."""
    rows = await sql.fetch(
        """SELECT id FROM payments AS p WHERE reference = $1
        AND NOT EXISTS (SELECT 1 FROM repayments AS r WHERE r.payment_id = p.id AND r.request_id = $2)""",
        *(request.reference, request_id),
    )
    if rows:
        raise Reject(REFERENCE_TAKEN, f"reference: payment {rows[0]['id']} has it already")


async def written(sql: Sql, charges: Sequence[Charge]) -> dict[str, int | None]:
    """Which of these charges are written down, by their own or a part's id; with the request that they came from."""
    ids = [(charge.id, each) for charge in charges for each in {charge.id, *(part.id for part in charge.parts)}]
    pairs = recordset(sql.dialect, "$1", "x", {"charge": "text", "gateway_id": "text"})
    rows = await sql.fetch(
        f"""SELECT x.charge, r.request_id FROM {pairs}
        JOIN (SELECT id AS payment_id, gateway_id FROM payments UNION ALL
            SELECT payment_id, gateway_id FROM installments) AS known ON known.gateway_id = x.gateway_id
        LEFT JOIN repayments AS r ON r.payment_id = known.payment_id""",
        orjson.dumps([{"charge": charge, "gateway_id": each} for charge, each in ids]).decode(),
    )
    return {row["charge"]: row["request_id"] for row in rows}


async def _original(sql: Sql, payment: Row) -> Original:
    parts = await sql.fetch(
        "SELECT status, gateway_id FROM installments WHERE payment_id = $1 ORDER BY number", payment["id"]
    )
    pieces = parts or [payment]
    charges = tuple(part["gateway_id"] for part in pieces if part["status"] in OPEN and part["gateway_id"])
    return Original(payment["id"], payment["reference"], payment["status"], payment["gateway_id"], charges)


def _check_payment(payment: Row, request: RepaymentRequest) -> None:
    if payment["status"] not in MAY_CLOSE:
        raise Reject(f"{payment['status']}_already", f"original_payment: {payment['id']} is {payment['status']}")
    if request.customer is not None and request.customer != payment["customer"]:
        raise Reject("customer_differs", f"customer: payment {payment['id']} is another customer's")


async def _check_others(sql: Sql, request_id: int, payment_id: int) -> None:
    """Of two requests for one payment the first goes on; one that has failed after tries may have left a charge."""
    rows = await sql.fetch(
        """SELECT id, reference, status FROM repayment_requests AS r
        WHERE original_payment_id = $1 AND id < $2 AND (status = 'pending' OR (status = 'failed' AND EXISTS (
            SELECT 1 FROM dead_letters AS d
            WHERE d.table_name = 'repayment_requests' AND d.row_id = r.id AND d.claim_no = r.claim_no
                AND d.reason IN ('attempts_used_up', 'outcome_unknown'))))
        ORDER BY id LIMIT 1""",
        *(payment_id, request_id),
    )
    if rows:
        [other] = rows
        says = (
            "is under way" if other["status"] == "pending" else "has failed and may have left a charge: retry that one"
        )
        raise Reject("another_request", f"original_payment: request {other['id']} ({other['reference']}) for it {says}")
