"""What the new checkout is told of a repayment: pure data, whose contract is docs/schemas/repayment_sync.schema.json.

Amounts are text with two decimals, dates ISO 8601. A key without meaning for a repayment is left out, not null.
"""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from models.repayment_requests import CENT, RepaymentRequest
from processors.repayments.gateway import Charge
from processors.repayments.validation import Case, Original

EVENT = "new_checkout.repayment_sync"
STATUS = "open"
"""Of a payment that has just been made."""


def build(request: RepaymentRequest, case: Case, charge: Charge) -> Mapping[str, Any]:
    """The payload of the event. Raises ValueError when the parts of the charge are not its total."""
    if charge.total != request.value:
        raise ValueError(f"the parts of charge {charge.id} do not sum up")
    first = charge.parts[0]
    payload: dict[str, Any] = {
        "event_reference": f"repayment_sync:{request.reference}",
        "repayment": {
            "reference": request.reference,
            "value": amount(charge.total),
            "billing_type": first.billing_type,
            "status": STATUS,
            "due_date": first.due_date.isoformat(),
            "gateway_id": charge.id,
        },
        "customer": {"gateway_id": case.customer},
        "installments": installments(charge),
    }
    if case.product_slug is not None:
        payload["product_slug"] = case.product_slug
    if case.original is not None:
        payload["original_payment"] = original_payment(case.original)
    return payload


def installments(charge: Charge) -> list[dict[str, Any]]:
    """The parts of a plan; of a single payment none."""
    if not charge.is_plan:
        return []
    return [
        {
            "number": number,
            "value": amount(part.value),
            "due_date": part.due_date.isoformat(),
            "gateway_id": part.id,
        }
        for number, part in enumerate(charge.parts, 1)
    ]


def original_payment(original: Original) -> dict[str, Any]:
    """What became of the payment that is split anew."""
    told: dict[str, Any] = {"id": original.id, "reference": original.reference, "status": "renegotiated"}
    return told if original.gateway_id is None else {**told, "gateway_id": original.gateway_id}


def amount(value: Decimal) -> str:
    """Text with two decimals."""
    return str(value.quantize(CENT))
