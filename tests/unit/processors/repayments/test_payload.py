"""The payload of the event: by its contract, whatever the repayment is."""

import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.outbox import encode
from models.repayment_requests import RepaymentRequest, even_installments
from processors.repayments import payload
from processors.repayments.gateway import Charge, Part
from processors.repayments.validation import Case, Original

SCHEMA: dict[str, Any] = json.loads(
    Path(__file__).parents[4].joinpath("docs/schemas/repayment_sync.schema.json").read_text()
)
DAY = date(2027, 1, 31)


def case_of(
    value: str = "100.00", parts: int = 1, slug: str | None = None, original: Original | None = None
) -> tuple[RepaymentRequest, Case, Charge]:
    """A request, its case, and the charge that the gateway has made for it."""
    split = even_installments(Decimal(value), parts, DAY)
    request = RepaymentRequest.parse(
        {
            "reference": "rep-1", "customer": "cus_1", "billing_type": "BOLETO", "value": value, "due_date": DAY,
            "installments": [part.model_dump() for part in split] if parts > 1 else [], "requested_by": "ana",
        }
    )  # fmt: skip
    made = tuple(
        Part.model_validate(
            {
                "id": f"pay_{part.number}", "customer": "cus_1", "value": part.value, "billingType": "BOLETO",
                "status": "PENDING", "dueDate": part.due_date, "externalReference": "rep-1",
                "installment": "plan-1" if parts > 1 else None, "installmentNumber": part.number,
            }
        )
        for part in split
    )  # fmt: skip
    return request, Case("cus_1", slug, original), Charge("plan-1" if parts > 1 else "pay_1", made)


ORIGINALS = [
    None,
    Original(12, "ped-1", "open", "pay_old", ("pay_old",)),
    Original(12, "ped-1", "overdue", None, ("pay_a", "pay_b")),
]


@pytest.mark.parametrize("original", ORIGINALS, ids=["no original", "original", "original in parts"])
@pytest.mark.parametrize("slug", [None, "curso-de-teatro"])
@pytest.mark.parametrize("parts", [1, 2, 60])
def test_payload_fits_its_schema(original: Original | None, slug: str | None, parts: int) -> None:
    """With and without original payment, product and installments; what is not there is left out, not null."""
    told = json.loads(encode(payload.build(*case_of(parts=parts, slug=slug, original=original))))
    jsonschema.validate(told, SCHEMA)
    assert ("original_payment" in told) == (original is not None)
    assert ("product_slug" in told) == (slug is not None)
    assert len(told["installments"]) == (0 if parts == 1 else parts)
    assert "null" not in json.dumps(told)


@given(st.decimals("0.60", "999999999.99", places=2), st.integers(2, 60))
def test_installments_of_a_payload_sum_up_to_its_value(value: Decimal, parts: int) -> None:
    """As decimal text, to the cent, and by the contract."""
    told = payload.build(*case_of(str(value), parts))
    jsonschema.validate(json.loads(encode(told)), SCHEMA)
    assert sum(Decimal(part["value"]) for part in told["installments"]) == Decimal(told["repayment"]["value"]) == value


def test_payload_is_refused_when_the_parts_of_the_charge_do_not_sum_up() -> None:
    """Nobody is told of a sum that is not one."""
    request, case, charge = case_of(parts=3)
    with pytest.raises(ValueError, match="do not sum up"):
        payload.build(request, case, Charge(charge.id, charge.parts[:2]))


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told["repayment"].update(value=100.0),
        lambda told: told["repayment"].update(value="100.0"),
        lambda told: told["installments"][0].update(due_date="31/01/2027"),
        lambda told: told.update(product_slug=None),
        lambda told: told.pop("customer"),
    ],
)
def test_schema_refuses_what_is_not_the_contract(change: Any) -> None:
    """A schema that takes everything would prove nothing."""
    told: dict[str, Any] = json.loads(encode(payload.build(*case_of(parts=2))))
    change(told)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(told, SCHEMA)


def test_examples_of_the_schema_fit_it() -> None:
    """They are what people copy."""
    for example in SCHEMA["examples"]:
        jsonschema.validate(example, SCHEMA)
