"""The steps of an act at the gateway, in their order: find or create the charge, keep one, cancel the original's.

Each may be repeated by whoever acts next; nothing is remembered here. What is written down is in `transaction.py`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from models.repayment_requests import RepaymentRequest
from processors.repayments import validation
from processors.repayments.gateway import Calls, Charge, Order, Part, Refused, charges, merged
from processors.repayments.validation import Case
from streams.errors import Reject, Retry


@dataclass(slots=True)
class Seen:
    """What an act knows of the gateway when it fails: both charges are named then, so that none is lost track of."""

    charge: Charge | None = None
    cancelling: str | None = None
    """The original's charge that is being cancelled."""

    def tell(self, error: str) -> str:
        """The error, and what exists."""
        told = [error]
        if self.cancelling is not None:
            told.append(f"the original's charge {self.cancelling} is not cancelled")
        if self.charge is not None:
            told.append(f"the new charge {self.charge.id} exists")
        return "; ".join(told)


async def find_or_create(
    request: RepaymentRequest, case: Case, calls: Calls, seen: Seen, *, first_try: bool
) -> Sequence[Charge]:
    """The charges of this request, mostly one, at least one; the one to keep first.

    What speaks against a request counts until its charge is created; then there is no way back.
    """
    problem = validation.problem(request, validation.today()) or validation.cancelled(case)
    if problem is not None and first_try:
        raise problem
    found = await calls.find(request.reference)
    if not found:
        if problem is not None:
            raise problem
        await _check_at_gateway(case, calls)
        created = await _create(request, case, calls)
        [seen.charge] = charges([created])
        found = merged(await calls.find(request.reference), created)
    seen.charge = found[0]
    return found


async def _check_at_gateway(case: Case, calls: Calls) -> None:
    """Before anything is created: has the original been paid, and our tables do not know yet?"""
    for charge_id in _open_charges(case):
        part = await calls.look(charge_id)
        if part is not None and not part.is_open:
            raise Reject("paid_already", f"original_payment: its charge {charge_id} is {part.status} at the gateway")


async def _create(request: RepaymentRequest, case: Case, calls: Calls) -> Part:
    order = Order(
        request.reference, case.customer, request.billing_type, request.value, request.due_date, _parts(request)
    )
    try:
        return await calls.create(order)
    except Refused as error:
        raise Reject("refused_by_gateway", str(error)) from None


def _parts(request: RepaymentRequest) -> int:
    return max(1, len(request.installments))


async def keep_one(found: Sequence[Charge], written: Collection[str], calls: Calls) -> Charge:
    """Of several charges the one that is written down, else the first; the others are cancelled."""
    kept, *others = sorted(found, key=lambda charge: (charge.id not in written, charge.age))
    for charge in others:
        await _cancel(charge, calls)
    return kept


async def _cancel(charge: Charge, calls: Calls) -> None:
    for part in charge.parts:
        await calls.cancel(part.id)


def check(charge: Charge, request: RepaymentRequest, case: Case) -> None:
    """Is the charge what was asked for? A plan's parts may not be there all at once. Raises Retry."""
    wanted = _parts(request)
    if len(charge.parts) != wanted:
        raise Retry(f"{len(charge.parts)} of {wanted} parts are at the gateway")
    alike = {(part.customer, part.billing_type) for part in charge.parts} == {(case.customer, request.billing_type)}
    if charge.total != request.value or not alike:
        raise Retry("what has this reference is for another amount, customer or billing type")


async def cancel_original(case: Case, calls: Calls, seen: Seen) -> None:
    """Only now, for the new charge exists; and what is cancelled already stays so."""
    for charge_id in _open_charges(case):
        seen.cancelling = charge_id
        await calls.cancel(charge_id)
    seen.cancelling = None


def _open_charges(case: Case) -> Sequence[str]:
    return () if case.original is None else case.original.open_charges


async def withdrawn(found: Sequence[Charge], calls: Calls, why: Reject) -> Reject:
    """A request that may not go on: what an earlier try of it has created is cancelled, so that nobody pays twice."""
    for charge in found:
        try:
            await _cancel(charge, calls)
        except Refused as error:
            return Reject(why.reason, f"{why.error}; its charge {charge.id} exists and cannot be cancelled: {error}")
    ids = ", ".join(charge.id for charge in found)
    return Reject(why.reason, f"{why.error}; its charge {ids} is cancelled" if found else why.error)
