"""Asaas' public API, version 3, as far as repayments need it: find, create, look at and cancel charges.

A charge is one payment, or a plan of several with one `installment` id. What the gateway answers is checked before it
is used. Whatever may be better later is Retry; `Refused` is its no to this very request. Not here: what is done with
charges, and in which order.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import groupby
from typing import Any, Protocol
from urllib.parse import quote, urlencode

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from processors._http import errors
from processors._http.answer import Answer, SendFailed
from processors._http.request import RequestDescription
from streams.errors import Retry
from streams.processor import Gate

PATH = "/v3/payments"
PAGE = 100
MAX_PAGES = 20
MAX_ANSWER = 1024 * 1024
MAX_ERROR = 300
"""Characters of an error's description that are kept."""

REFUSALS = {400, 409, 422}
"""Answers that are about the request itself. Any other that is no success may be another one later."""

STILL_OPEN = {"PENDING", "OVERDUE", "AWAITING_RISK_ANALYSIS"}
"""States in which nothing has been paid, so that a charge may be cancelled."""


class Refused(Exception):
    """The gateway says no to this request, and will again; the text has its words, without secrets."""


class Sends(Protocol):
    """The part of `processors._http.sender.Sender` that is needed."""

    async def send(self, what: RequestDescription, headers: Mapping[str, str], gate: Gate) -> Answer: ...


class Part(BaseModel):
    """One payment as the gateway has it. `plan` is the id that the parts of one charge share."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    id: str = Field(min_length=1)
    customer: str
    value: Decimal
    billing_type: str = Field(alias="billingType")
    status: str
    due_date: date = Field(alias="dueDate")
    reference: str | None = Field(default=None, alias="externalReference")
    plan: str | None = Field(default=None, alias="installment")
    number: int | None = Field(default=None, alias="installmentNumber")
    deleted: bool = False
    created: date = Field(default=date.min, alias="dateCreated")
    invoice: str | None = Field(default=None, alias="invoiceNumber")

    @property
    def is_open(self) -> bool:
        """Whether it can still be cancelled."""
        return self.status in STILL_OPEN


@dataclass(frozen=True, slots=True)
class Charge:
    """One payment, or the parts of a plan by their numbers. `id` is that of the payment, or of the plan."""

    id: str
    parts: tuple[Part, ...]

    @property
    def total(self) -> Decimal:
        return sum((part.value for part in self.parts), Decimal(0))

    @property
    def is_plan(self) -> bool:
        return self.parts[0].plan is not None

    @property
    def age(self) -> tuple[bool, date, str, str]:
        """Sorts the one to keep first: what somebody has begun to pay, then the older one. The same for everybody."""
        first = min(self.parts, key=lambda part: (part.invoice or "").zfill(20))
        untouched = all(part.is_open for part in self.parts)
        return untouched, first.created, (first.invoice or "").zfill(20), self.id


@dataclass(frozen=True, slots=True)
class Order:
    """A charge to be created: `parts` is 1 for a single payment, else the number of monthly installments."""

    reference: str
    customer: str
    billing_type: str
    value: Decimal
    due_date: date
    parts: int

    def body(self) -> bytes:
        """As the gateway wants it. Amounts are JSON numbers there; they are written from the decimal, never a float."""
        amount = orjson.Fragment(str(self.value))
        split = {"value": amount} if self.parts == 1 else {"installmentCount": self.parts, "totalValue": amount}
        return orjson.dumps(
            {
                "customer": self.customer,
                "billingType": self.billing_type,
                "dueDate": self.due_date.isoformat(),
                "externalReference": self.reference,
                **split,
            }
        )


class Gateway:
    """Where it is, with or without /v3, and how it knows us. `timeout` bounds each request, in seconds."""

    def __init__(self, sender: Sends, url: str, token: str, timeout: float, agent: str) -> None:
        self.sender, self.timeout, self.agent = sender, timeout, agent
        self.url, self.token = url.rstrip("/").removesuffix("/v3") + PATH, token

    def calls(self, gate: Gate, traceparent: str | None) -> "Calls":
        """The calls of one act, each of which passes its gate."""
        headers = {"access_token": self.token, "User-Agent": self.agent, "Content-Type": "application/json"}
        if traceparent:
            headers["traceparent"] = traceparent
        return Calls(self, gate, headers)


class Calls:
    """The requests of one act, one after the other."""

    def __init__(self, gateway: Gateway, gate: Gate, headers: Mapping[str, str]) -> None:
        self._gateway, self._gate, self._headers = gateway, gate, headers

    async def find(self, reference: str) -> list[Charge]:
        """Every charge with this reference that is not cancelled; the one to keep first."""
        parts: list[Part] = []
        for page in range(MAX_PAGES):
            query = urlencode({"externalReference": reference, "limit": PAGE, "offset": page * PAGE})
            listed = _object(await self._expect("GET", f"?{query}"))
            data = listed.get("data")
            if not isinstance(data, list):
                raise Retry("the gateway's list of charges has no data")
            parts += [_part(each) for each in data]
            if not listed.get("hasMore"):
                return charges(part for part in parts if part.reference == reference and not part.deleted)
        raise Retry(f"the gateway lists more than {MAX_PAGES * PAGE} charges for one reference")

    async def create(self, order: Order) -> Part:
        """Make a charge, and return its only or its first part. It may exist also after an error."""
        return _part(_object(await self._expect("POST", "", order.body())))

    async def look(self, charge_id: str) -> Part | None:
        """One payment, None if there is none or it is cancelled."""
        answer = await self._send("GET", f"/{quote(charge_id, safe='')}")
        if answer.status == 404:
            return None
        part = _part(_object(self._checked(answer)))
        return None if part.deleted else part

    async def cancel(self, charge_id: str) -> None:
        """Cancel one payment; one that is cancelled or gone already is no error. Raises Refused."""
        answer = await self._send("DELETE", f"/{quote(charge_id, safe='')}")
        if answer.status == 404:
            return
        try:
            self._checked(answer)
        except Refused:
            if await self.look(charge_id) is not None:
                raise

    # ---- one request

    async def _expect(self, method: str, path: str, body: bytes = b"") -> Answer:
        return self._checked(await self._send(method, path, body))

    async def _send(self, method: str, path: str, body: bytes = b"") -> Answer:
        what = self._describe(method, path, body)
        try:
            return await self._gateway.sender.send(what, {}, self._gate)
        except SendFailed as error:
            # an unanswered question has changed nothing
            in_doubt = error.in_doubt and method != "GET"
            raise Retry(f"{method} at the gateway: {errors.clean(str(error), what)}", error.fault, in_doubt) from None

    def _describe(self, method: str, path: str, body: bytes) -> RequestDescription:
        g = self._gateway
        return RequestDescription(
            method,
            g.url + path,
            self._headers,
            body,
            g.timeout,
            secrets=(g.token,),
            repeatable=method != "POST",
            max_body=MAX_ANSWER,
        )

    def _checked(self, answer: Answer) -> Answer:
        if 200 <= answer.status < 300:
            return answer
        text = errors.clean(said(answer), self._describe("", "", b""))
        if answer.status in REFUSALS:
            raise Refused(text)
        # 404 here is no charge that is gone (see `look`), but an address that is wrong for all
        fault = "HTTP 404" if answer.status == 404 else errors.fault(answer.status)
        raise Retry(text, fault, not_before=errors.retry_after(answer, datetime.now(UTC)))


# ---- answers


def charges(parts: Iterable[Part]) -> list[Charge]:
    """These payments, those of a plan together; the one to keep first."""

    def whose(part: Part) -> str:
        return part.plan or part.id

    ordered = sorted(parts, key=lambda part: (whose(part), part.number or 0, part.id))
    return sorted((Charge(key, tuple(group)) for key, group in groupby(ordered, key=whose)), key=lambda c: c.age)


def merged(found: Sequence[Charge], created: Part) -> list[Charge]:
    """What was found, with the one that was just created, which a list may not show yet."""
    parts = {part.id: part for charge in found for part in charge.parts}
    return charges({created.id: created, **parts}.values())


def said(answer: Answer) -> str:
    """An answer that is no success, in words: the codes and descriptions of its errors, or the beginning of it."""
    try:
        listed = json.loads(answer.text)["errors"]
        text = "; ".join(f"{each['code']}: {each['description']}" for each in listed)
    except (ValueError, LookupError, TypeError, RecursionError):
        text = answer.text
    return errors.refusal(Answer(answer.status, text[:MAX_ERROR], answer.location))


def _object(answer: Answer) -> dict[str, Any]:
    try:
        value = json.loads(answer.text, parse_float=Decimal)
    except (ValueError, RecursionError):
        raise Retry("the gateway's answer is not JSON") from None
    if not isinstance(value, dict):
        raise Retry("the gateway's answer is no JSON object")
    return value


def _part(value: object) -> Part:
    try:
        return Part.model_validate(value)
    except ValidationError as error:
        fields = sorted({str(each["loc"][0]) if each["loc"] else "payment" for each in error.errors()})
        raise Retry(f"the gateway's payment is not as documented: {', '.join(fields)}") from None
