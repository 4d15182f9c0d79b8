"""What a request says itself: whether the gateway could make such a charge on a day."""

from datetime import date, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.repayment_requests import RepaymentRequest, even_installments
from processors.repayments.validation import problem

DAY = date(2027, 1, 31)


def request(parts: list[tuple[str, date]], value: str = "100.00", due: date = DAY) -> RepaymentRequest:
    """A request with these installments."""
    listed: list[dict[str, Any]] = [{"number": n, "value": v, "due_date": d} for n, (v, d) in enumerate(parts, 1)]
    return RepaymentRequest.parse(
        {
            "reference": "r", "customer": "cus_1", "billing_type": "PIX", "value": value, "due_date": due,
            "installments": listed, "requested_by": "ana",
        }
    )  # fmt: skip


def test_due_today_is_in_time() -> None:
    """And yesterday is not."""
    assert problem(request([]), DAY) is None
    refused = problem(request([]), DAY + timedelta(days=1))
    assert refused is not None
    assert (refused.reason, refused.error) == ("past_due_date", "due_date: 2027-01-31 lies before 2027-02-01")


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([("100.00", DAY)], None),
        ([("50.00", DAY), ("50.00", date(2027, 2, 28))], None),
        ([("33.33", DAY), ("33.33", date(2027, 2, 28)), ("33.34", date(2027, 3, 31))], None),
        ([("33.34", DAY), ("33.33", date(2027, 2, 28)), ("33.33", date(2027, 3, 31))], "installments_not_offered"),
        ([("50.00", DAY), ("50.00", date(2027, 3, 2))], "installments_not_offered"),
        ([("50.00", date(2027, 2, 1)), ("50.00", date(2027, 3, 1))], "installments_not_offered"),
        ([("50.00", DAY), ("50.01", date(2027, 2, 28))], "installments_do_not_sum_up"),
        ([("99.99", DAY)], "installments_do_not_sum_up"),
    ],
)
def test_installments_are_those_that_the_gateway_makes(parts: list[tuple[str, date]], reason: str | None) -> None:
    """It takes a count and a total, so nothing else can be asked for."""
    refused = problem(request(parts), DAY)
    assert (refused and refused.reason) == reason
    assert refused is None or refused.error.startswith("installments: ")


@given(st.decimals("0.60", "999999999.99", places=2), st.integers(1, 60))
def test_even_split_is_always_offered(value: Decimal, count: int) -> None:
    """What the page and the command make of a number is taken."""
    parts = [(str(part.value), part.due_date) for part in even_installments(value, count, DAY)]
    assert problem(request(parts, str(value)), DAY) is None
