"""The form of a request for a repayment: what is taken, what is refused, in which words; and the one way to split."""

import json
from datetime import date
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.repayment_requests import (
    MAX_BYTES,
    MAX_INSTALLMENTS,
    InvalidRequest,
    RepaymentRequest,
    even_installments,
    new_reference,
)

GOOD: dict[str, Any] = {
    "reference": "rep-1",
    "original_payment": 12,
    "customer": None,
    "product_slug": "curso-de-teatro",
    "billing_type": "PIX",
    "value": "1200.00",
    "due_date": "2027-01-31",
    "installments": [
        {"number": 1, "value": "600.00", "due_date": "2027-01-31"},
        {"number": 2, "value": "600.00", "due_date": "2027-02-28"},
    ],
    "requested_by": "ana",
}


def test_request_is_the_same_after_json_and_back() -> None:
    """Money is text with two decimals on the wire and Decimal here."""
    request = RepaymentRequest.from_json(json.dumps(GOOD).encode())
    assert json.loads(request.to_json()) == GOOD
    assert RepaymentRequest.from_json(request.to_json()) == request
    assert (request.value, request.installments[1].due_date) == (Decimal("1200.00"), date(2027, 2, 28))


@pytest.mark.parametrize(("given", "kept"), [("5", "5.00"), ("5.1", "5.10"), ("999999999999.99", "999999999999.99")])
def test_amount_is_kept_with_two_decimals(given: str, kept: str) -> None:
    """As text or as Decimal, whichever way it is written."""
    for value in (given, Decimal(given)):
        assert str(RepaymentRequest.parse(GOOD | {"value": value}).value) == kept


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"value": 1200.00}, "value: must be an amount as text"),
        ({"value": 1200}, "value: must be an amount as text"),
        ({"value": "1e3"}, "value: must be an amount as text"),
        ({"value": "1200,00"}, "value: must be an amount as text"),
        ({"value": "1.005"}, "value: must be an amount as text"),
        ({"value": Decimal("1.005")}, "value: must be an amount as text"),
        ({"value": Decimal("NaN")}, "value: must be an amount as text"),
        ({"value": "-1.00"}, "value: must be an amount as text"),
        ({"value": "٣.00"}, "value: must be an amount as text"),
        ({"value": "0.00"}, "value: must be more than 0"),
        ({"reference": "a b"}, "reference: must be at most 100 letters"),
        ({"reference": "a\n"}, "reference: must be at most 100 letters"),
        ({"reference": ""}, "reference: must be at most 100 letters"),
        ({"reference": "x" * 101}, "reference: must be at most 100 letters"),
        ({"original_payment": "12"}, "original_payment: must be an integer"),
        ({"original_payment": True}, "original_payment: must be an integer"),
        ({"original_payment": 0}, "original_payment: "),
        ({"original_payment": 2**63}, "original_payment: "),
        ({"original_payment": None}, "customer: is needed where there is no original payment"),
        ({"customer": "12"}, "customer: must be the gateway's id"),
        ({"product_slug": "Ação"}, "product_slug: must be at most 100 small letters"),
        ({"billing_type": "CASH"}, "billing_type: must be BOLETO, PIX or CREDIT_CARD"),
        ({"due_date": "31/01/2027"}, "due_date: must be a date as YYYY-MM-DD"),
        ({"due_date": "2027-02-29"}, "due_date: is no date of the calendar"),
        ({"requested_by": " "}, "requested_by: must be a name"),
        ({"requested_by": "a\nb"}, "requested_by: must be a name"),
        ({"more": 1}, "more: is not a field of a request"),
        ({"installments": {}}, "installments: must be a list"),
        ({"installments": [1]}, "installments.0: must be an object"),
        ({"installments": [{"number": 1, "value": "1.00"}]}, "installments.0.due_date: is required"),
        ({"installments": GOOD["installments"][1:]}, "installments: must be numbered 1, 2, ..."),
        ({"installments": GOOD["installments"][:1] * 61}, "installments: "),
    ],
)
def test_field_is_named_and_not_quoted_when_it_is_refused(change: dict[str, Any], says: str) -> None:
    """Whoever asked sees which field, and why."""
    with pytest.raises(InvalidRequest) as caught:
        RepaymentRequest.parse(GOOD | change)
    assert str(caught.value).startswith(says)
    assert str(caught.value).startswith(caught.value.field)
    assert "12\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["reference", "billing_type", "value", "due_date", "requested_by"])
def test_field_is_named_when_it_is_missing(field: str) -> None:
    """The others have a meaning when they are left out."""
    with pytest.raises(InvalidRequest, match=f"^{field}: is required$"):
        RepaymentRequest.parse({name: value for name, value in GOOD.items() if name != field})


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b'{"value": NaN}', b"[" * 100_000, b" " * (MAX_BYTES + 1)]
)
def test_body_is_refused_when_it_is_no_request(body: bytes) -> None:
    """Whatever the bytes are, there is one kind of error."""
    with pytest.raises(InvalidRequest):
        RepaymentRequest.from_json(body)


@given(st.binary(max_size=200))
def test_nothing_but_invalid_request_is_raised_for_any_bytes(body: bytes) -> None:
    """Decoding is total."""
    with pytest.raises(InvalidRequest):
        RepaymentRequest.from_json(body)


def test_new_references_are_new_and_fit() -> None:
    """They are taken as they are."""
    assert new_reference() != new_reference()
    RepaymentRequest.parse(GOOD | {"reference": new_reference()})


# ---- splitting


@given(
    st.decimals("0.01", "999999999999.99", places=2),
    st.integers(1, MAX_INSTALLMENTS),
    st.dates(date(2026, 1, 1), date(2090, 12, 31)),
)
def test_installments_sum_up_whatever_is_split(value: Decimal, count: int, first: date) -> None:
    """To the cent; equal but for the last; one a month, on the same day or the last of a shorter month."""
    if value * 100 < count:
        with pytest.raises(InvalidRequest):
            even_installments(value, count, first)
        return
    parts = even_installments(value, count, first)
    assert sum(part.value for part in parts) == value
    assert len({part.value for part in parts[:-1]}) <= 1
    assert [part.number for part in parts] == list(range(1, count + 1))
    months = [part.due_date.year * 12 + part.due_date.month for part in parts]
    assert months == list(range(months[0], months[0] + count))
    assert all(part.due_date.day == first.day or part.due_date.day < first.day for part in parts)
    RepaymentRequest.parse(
        GOOD | {"value": value, "due_date": first, "installments": [part.model_dump() for part in parts]}
    )


@pytest.mark.parametrize("count", [0, -1, MAX_INSTALLMENTS + 1])
def test_split_is_refused_when_there_are_none_or_too_many(count: int) -> None:
    """By the name of the field."""
    with pytest.raises(InvalidRequest, match="installments: must be 1 to 60"):
        even_installments(Decimal("100.00"), count, date(2027, 1, 31))


def test_split_is_refused_when_it_leaves_the_calendar() -> None:
    """A date beyond the year 9999 is nobody's wish."""
    with pytest.raises(InvalidRequest, match="too far ahead"):
        even_installments(Decimal("100.00"), 2, date(9999, 12, 31))
