"""The form of a repayment: amounts as people write them, parts that sum up, and whose mistake it is."""

from datetime import date
from decimal import Decimal

import pytest

from models.repayment_requests import InvalidRequest
from processors.admin.pages_repayments import read_request

GOOD = {
    "reference": "rep-1",
    "original_payment": "12",
    "customer": "",
    "product_slug": "",
    "billing_type": "PIX",
    "value": "1.200,00",
    "due_date": "2026-12-31",
    "installments": "1",
    "token": "x",
}


@pytest.mark.parametrize(
    ("typed", "amount"),
    [
        ("1.200,00", "1200.00"),
        ("1200", "1200.00"),
        ("1200,5", "1200.50"),
        ("1200.50", "1200.50"),
        ("1.234.567", "1234567.00"),
        ("0,01", "0.01"),
    ],
)
def test_amount_is_read_as_it_is_meant(typed: str, amount: str) -> None:
    """A dot between thousands is none before cents."""
    assert read_request({**GOOD, "value": typed}, "ana").value == Decimal(amount)


@pytest.mark.parametrize("typed", ["", "mil", "1,200.00", "1.20,00", "-5", "0", "1e3", "NaN", "1.200,001"])
def test_amount_that_could_mean_two_things_is_refused(typed: str) -> None:
    """Money is not guessed."""
    with pytest.raises(InvalidRequest) as caught:
        read_request({**GOOD, "value": typed}, "ana")
    assert caught.value.field == "value"


def test_parts_sum_up_and_follow_month_by_month() -> None:
    """The first on the day that was typed."""
    request = read_request({**GOOD, "value": "100,00", "installments": "3"}, "ana")
    assert sum(part.value for part in request.installments) == Decimal("100.00")
    assert [part.due_date for part in request.installments] == [
        date(2026, 12, 31), date(2027, 1, 31), date(2027, 2, 28),
    ]  # fmt: skip
    assert request.requested_by == "ana"


@pytest.mark.parametrize(
    ("field", "typed"),
    [
        ("reference", ""), ("reference", "a b"), ("original_payment", "abc"), ("customer", "12"),
        ("product_slug", "A b"), ("billing_type", "CASH"), ("due_date", "31/12/2026"),
        ("installments", "61"), ("installments", "-1"),
    ],
)  # fmt: skip
def test_field_that_is_wrong_is_named(field: str, typed: str) -> None:
    """So that the page can say which."""
    with pytest.raises(InvalidRequest) as caught:
        read_request({**GOOD, field: typed}, "ana")
    assert caught.value.field.partition(".")[0] == field


def test_customer_is_needed_where_there_is_no_payment() -> None:
    """Somebody must owe it."""
    with pytest.raises(InvalidRequest) as caught:
        read_request({**GOOD, "original_payment": ""}, "ana")
    assert caught.value.field == "customer"
    assert read_request({**GOOD, "original_payment": "", "customer": "cus_1"}, "ana").customer == "cus_1"
