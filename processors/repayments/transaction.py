"""What is written of a repayment, in the transaction that also says that its request is done. All of it, or nothing.

Not here: when it is written, and that it is written once (`streams.processor.Records`).
"""

from dataclasses import dataclass

import orjson

from models.audits import PAYMENT_TYPE
from models.outbox import TRACEPARENT, encode
from models.repayment_requests import RepaymentRequest
from processors._audit import who
from processors.repayments import payload, validation
from processors.repayments.gateway import Charge
from processors.repayments.validation import Case
from streams.errors import Retry
from streams.sql import Sql, now


@dataclass(frozen=True, slots=True)
class Done:
    """A request that has been brought about at the gateway, and is to be written down."""

    request: RepaymentRequest
    case: Case
    charge: Charge


async def write(sql: Sql, request_id: int, done: Done, traceparent: str | None) -> None:
    """Write it, in the caller's transaction. Raises Retry when the original is not open any more."""
    before = await _close_original(sql, done.case)
    payment_id = await _payment(sql, done)
    await _installments(sql, payment_id, done.charge)
    await _repayment(sql, request_id, payment_id, done)
    await _audit(sql, payment_id, before, done)
    await _event(sql, done, traceparent)


async def _close_original(sql: Sql, case: Case) -> str | None:
    """The original payment is renegotiated from now on; the status that it had."""
    if case.original is None:
        return None
    lock = "FOR UPDATE" if sql.dialect == "postgresql" else ""
    rows = await sql.fetch(f"SELECT status FROM payments WHERE id = $1 {lock}", case.original.id)
    if not rows or rows[0]["status"] not in validation.MAY_CLOSE:
        raise Retry(f"payment {case.original.id} is {rows[0]['status'] if rows else 'gone'} meanwhile")
    clock = now(sql.dialect)
    await sql.fetch(
        f"UPDATE payments SET status = 'renegotiated', updated_at = {clock} WHERE id = $1", case.original.id
    )
    await sql.fetch(
        f"""UPDATE installments SET status = 'cancelled', updated_at = {clock}
        WHERE payment_id = $1 AND status IN ('open', 'overdue')""",
        case.original.id,
    )
    before: str = rows[0]["status"]
    return before


async def _payment(sql: Sql, done: Done) -> int:
    charge, request = done.charge, done.request
    [row] = await sql.fetch(
        """INSERT INTO payments
        (reference, customer, billing_type, value, status, due_date, gateway_id, product_slug)
        VALUES ($1, $2, $3, $4, $5, $6, $7, $8) RETURNING id""",
        *(request.reference, done.case.customer, charge.parts[0].billing_type, _own(sql, charge.total)),
        *(payload.STATUS, _own(sql, charge.parts[0].due_date), charge.id, done.case.product_slug),
    )
    return int(row["id"])


async def _installments(sql: Sql, payment_id: int, charge: Charge) -> None:
    if not charge.is_plan:
        return
    await sql.many(
        """INSERT INTO installments (payment_id, number, value, status, due_date, gateway_id)
        VALUES ($1, $2, $3, $4, $5, $6)""",
        [
            (payment_id, number, _own(sql, part.value), payload.STATUS, _own(sql, part.due_date), part.id)
            for number, part in enumerate(charge.parts, 1)
        ],
    )


async def _repayment(sql: Sql, request_id: int, payment_id: int, done: Done) -> None:
    original = done.case.original
    await sql.fetch(
        """INSERT INTO repayments (reference, request_id, payment_id, original_payment_id, requested_by)
        VALUES ($1, $2, $3, $4, $5)""",
        *(done.request.reference, request_id, payment_id, None if original is None else original.id),
        done.request.requested_by,
    )


async def _audit(sql: Sql, payment_id: int, before: str | None, done: Done) -> None:
    """Of the original what became of it; where there is none, of the new payment that it was made."""
    original, clock = done.case.original, now(sql.dialect)
    event, subject = ("created", payment_id) if original is None else ("updated", original.id)
    old = {} if before is None else {"status": before}
    new = {"status": payload.STATUS if original is None else "renegotiated"}
    new |= {"repayment": done.request.reference, "gateway_id": done.charge.id}
    await sql.fetch(
        f"""INSERT INTO audits
        (event, auditable_type, auditable_id, old_values, new_values, tags, created_at, updated_at)
        VALUES ($1, $2, $3, $4, $5, $6, {clock}, {clock})""",
        *(event, PAYMENT_TYPE, subject, orjson.dumps(old).decode(), orjson.dumps(new).decode()),
        who("repayment", done.request.requested_by),
    )


async def _event(sql: Sql, done: Done, traceparent: str | None) -> None:
    text = encode(payload.build(done.request, done.case, done.charge))
    value = "$2::text::jsonb" if sql.dialect == "postgresql" else "$2"
    context = traceparent if traceparent and TRACEPARENT.fullmatch(traceparent) else None
    await sql.fetch(
        f"INSERT INTO outbox_events (event_name, payload, traceparent) VALUES ($1, {value}, $3)",
        *(payload.EVENT, text, context),
    )


def _own(sql: Sql, value: object) -> object:
    """Amounts and days as the driver takes them: SQLite's has neither, and stores their text."""
    return value if sql.dialect == "postgresql" else str(value)
