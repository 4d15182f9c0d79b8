"""A request for a repayment: a debt, split anew. The body of the message that asks for it, and its form.

Form only: that the fields are there, and that each is written as it must be. Whether the payment exists, is open, and
may be split so is the processor's to say (`processors/repayments`). A refusal never quotes a value.
"""

import re
from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from typing import Annotated, Any, Literal, Self
from uuid import uuid4

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, ValidationError

BillingType = Literal["BOLETO", "PIX", "CREDIT_CARD"]

MAX_BYTES = 64 * 1024
"""Of a request as JSON text."""
MAX_INSTALLMENTS = 60
CENT = Decimal("0.01")

_MONEY = re.compile(r"(?:0|[1-9][0-9]{0,11})(?:\.[0-9]{1,2})?")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


class InvalidRequest(ValueError):
    """A request cannot be taken: `field` is the one at fault ("" for the whole), `reason` a code for machines."""

    def __init__(self, field: str, why: str, reason: str = "invalid_request") -> None:
        super().__init__(f"{field}: {why}" if field else why)
        self.field, self.why, self.reason = field, why, reason


def _money(value: object) -> Decimal:
    """A positive amount with cents; never a float, which has none."""
    if isinstance(value, Decimal) and value.is_finite() and abs(value.adjusted()) <= 12:
        value = f"{value:f}"
    if not isinstance(value, str) or not _MONEY.fullmatch(value):
        raise ValueError('must be an amount as text, such as "1200.00"')
    amount = Decimal(value).quantize(CENT)
    if amount <= 0:
        raise ValueError("must be more than 0")
    return amount


def _date(value: object) -> date:
    if type(value) is date:
        return value
    if not isinstance(value, str) or not _DATE.fullmatch(value):
        raise ValueError("must be a date as YYYY-MM-DD")
    try:
        return date.fromisoformat(value)
    except ValueError:
        raise ValueError("is no date of the calendar") from None


def _matching(pattern: str, says: str) -> BeforeValidator:
    form = re.compile(pattern)

    def check(value: object) -> object:
        if not isinstance(value, str) or not form.fullmatch(value):
            raise ValueError(says)
        return value

    return BeforeValidator(check)


Money = Annotated[Decimal, BeforeValidator(_money)]
Day = Annotated[date, BeforeValidator(_date)]
Reference = Annotated[
    str,
    _matching(
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
        "must be at most 100 letters, digits, dots, hyphens and underscores, and begin with a letter or a digit",
    ),
]
Customer = Annotated[str, _matching(r"cus_[A-Za-z0-9_]{1,60}", "must be the gateway's id of a customer: cus_...")]
Slug = Annotated[
    str, _matching(r"[a-z0-9][a-z0-9_-]{0,99}", "must be at most 100 small letters, digits, hyphens and underscores")
]
Who = Annotated[str, _matching(r"[^\s\x00-\x1f\x7f][^\x00-\x1f\x7f]{0,99}", "must be a name of at most 100 characters")]


class Installment(BaseModel):
    """A part of the new charge, as it is wanted. `number` counts from 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    number: Annotated[StrictInt, Field(ge=1, le=MAX_INSTALLMENTS)]
    value: Money
    due_date: Day


class RepaymentRequest(BaseModel):
    """What somebody asks for. `original_payment` is the id of the payment that is split anew, None for a new debt.

    Without an original payment a customer is needed. Without installments it is one charge.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    reference: Reference
    original_payment: Annotated[StrictInt, Field(ge=1, lt=2**63)] | None = None
    customer: Customer | None = None
    product_slug: Slug | None = None
    billing_type: BillingType
    value: Money
    due_date: Day
    installments: Annotated[tuple[Installment, ...], Field(max_length=MAX_INSTALLMENTS)] = ()
    requested_by: Who

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        """The request with these fields. Raises InvalidRequest, which names the first field that is not as it must be.

        Amounts are text or Decimal, dates text or date; nothing is converted but that.
        """
        try:
            request = cls.model_validate(dict(fields))
        except ValidationError as error:
            raise _invalid(error) from None
        if request.original_payment is None and request.customer is None:
            raise InvalidRequest("customer", "is needed where there is no original payment")
        if [part.number for part in request.installments] != list(range(1, len(request.installments) + 1)):
            raise InvalidRequest("installments", "must be numbered 1, 2, ... in this order")
        return request

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """The request in the body of a message. Raises InvalidRequest, and nothing else."""
        if len(body) > MAX_BYTES:
            raise InvalidRequest("", f"the request has {len(body):,} bytes, more than {MAX_BYTES:,}")
        try:
            fields = orjson.loads(body)
        except orjson.JSONDecodeError:
            raise InvalidRequest("", "the request is not JSON") from None
        if not isinstance(fields, dict):
            raise InvalidRequest("", "the request must be a JSON object")
        return cls.parse(fields)

    def to_json(self) -> bytes:
        """The same as JSON: amounts as text with two decimals, every field there."""
        return self.model_dump_json().encode()


def new_reference() -> str:
    """A reference that nobody has used."""
    return f"rep-{uuid4().hex}"


def even_installments(value: Decimal, count: int, first: date) -> tuple[Installment, ...]:
    """The one way in which the gateway splits an amount: equal parts, month by month, odd cents in the last.

    Raises InvalidRequest where that cannot be: no cent for each, too many, or a date beyond the calendar.
    """
    if not 1 <= count <= MAX_INSTALLMENTS:
        raise InvalidRequest("installments", f"must be 1 to {MAX_INSTALLMENTS}")
    cents = int(value * 100)
    part, rest = divmod(cents, count)
    if part == 0:
        raise InvalidRequest("installments", "are more than there are cents")
    values = [part] * (count - 1) + [part + rest]
    return tuple(
        Installment(number=n + 1, value=Decimal(cents).scaleb(-2).quantize(CENT), due_date=_months_later(first, n))
        for n, cents in enumerate(values)
    )


def _months_later(day: date, months: int) -> date:
    """The same day so many months later; the last of the month where that has no such day."""
    years, month = divmod(day.month - 1 + months, 12)
    if day.year + years > date.max.year:
        raise InvalidRequest("due_date", "lies too far ahead")
    for last in (day.day, 30, 29, 28):
        if last <= day.day:
            try:
                return date(day.year + years, month + 1, last)
            except ValueError:
                continue
    raise AssertionError("every month has 28 days")


def _invalid(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    return InvalidRequest(field, _SAYS.get(first["type"], first["msg"].removeprefix("Value error, ")))


_SAYS = {
    "missing": "is required",
    "extra_forbidden": "is not a field of a request",
    "int_type": "must be an integer",
    "literal_error": "must be BOLETO, PIX or CREDIT_CARD",
    "tuple_type": "must be a list",
    "model_type": "must be an object",
}
