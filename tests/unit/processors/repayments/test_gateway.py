"""What is asked of the gateway, and what its answers are taken for; without a socket."""

import json
from collections.abc import Callable, Mapping
from datetime import date
from decimal import Decimal
from typing import Any

import pytest

from processors._http.answer import Answer, SendFailed
from processors._http.request import RequestDescription
from processors.repayments.gateway import Calls, Charge, Gateway, Order, Part, Refused, charges, merged
from streams.errors import Retry
from streams.processor import Gate

TOKEN = "$aact_secret"
ORDER = Order("rep-1", "cus_1", "BOLETO", Decimal("100.10"), date(2027, 1, 31), 1)


def payment(number: int = 1, **changes: Any) -> dict[str, Any]:
    """A payment as the API shows it."""
    return {
        "object": "payment", "id": f"pay_{number}", "dateCreated": "2026-12-01", "customer": "cus_1", "value": 100.1,
        "billingType": "BOLETO", "status": "PENDING", "dueDate": "2027-01-31", "externalReference": "rep-1",
        "installment": None, "installmentNumber": None, "invoiceNumber": f"{number:08}", "deleted": False, **changes,
    }  # fmt: skip


def listed(*payments: dict[str, Any], more: bool = False) -> Answer:
    """A page of a list."""
    return Answer(200, json.dumps({"object": "list", "hasMore": more, "data": payments}))


class Script:
    """Sends nothing, and answers as it is told."""

    def __init__(self, answer: Callable[[RequestDescription], Answer]) -> None:
        self.requests: list[RequestDescription] = []
        self._answer = answer

    async def send(self, what: RequestDescription, headers: Mapping[str, str], gate: Gate) -> Answer:
        """See `processors.repayments.gateway.Sends`."""
        self.requests.append(what)
        return self._answer(what)


def calls(script: Script, trace: str | None = None) -> Calls:
    """The calls of one act."""
    return Gateway(script, "https://api.example.com/", TOKEN, 5.0, "agent").calls(Gate(0.0, 0.0, None), trace)


def answering(*answers: Answer) -> Script:
    """These, one after the other."""
    left = iter(answers)
    return Script(lambda what: next(left))


# ---- what is asked


async def test_charge_is_created_with_its_amount_as_it_was_written() -> None:
    """A JSON number without a float on its way, the token in its header, and no second try of the same request."""
    script = answering(Answer(200, json.dumps(payment())))
    made = await calls(script, "00-trace").create(ORDER)
    [what] = script.requests
    assert (what.method, what.url) == ("POST", "https://api.example.com/v3/payments")
    assert b'"value":100.10' in what.body
    assert json.loads(what.body) == {
        "customer": "cus_1", "billingType": "BOLETO", "dueDate": "2027-01-31", "externalReference": "rep-1",
        "value": 100.1,
    }  # fmt: skip
    assert (what.headers["access_token"], what.headers["traceparent"]) == (TOKEN, "00-trace")
    assert (what.repeatable, what.timeout, what.secrets) == (False, 5.0, (TOKEN,))
    assert (made.id, made.value) == ("pay_1", Decimal("100.1"))


@pytest.mark.parametrize(
    "url", ["https://api.example.com", "https://api.example.com/v3", "https://api.example.com/v3/"]
)
def test_address_may_name_the_version_or_not(url: str) -> None:
    """The gateway's own documents write it either way."""
    assert Gateway(answering(), url, TOKEN, 5.0, "agent").url == "https://api.example.com/v3/payments"


def test_plan_is_ordered_by_its_count_and_total() -> None:
    """A single payment has neither."""
    body = json.loads(Order("r", "cus_1", "PIX", Decimal("100.00"), date(2027, 1, 31), 3).body())
    assert (body["installmentCount"], body["totalValue"]) == (3, 100)
    assert "value" not in body


async def test_all_pages_of_a_list_are_read() -> None:
    """What belongs to another reference, or is cancelled, is none of ours."""
    pages = [
        listed(payment(1), payment(2, externalReference="rep-10"), more=True),
        listed(payment(3, deleted=True), payment(4)),
    ]
    script = answering(*pages)
    found = await calls(script).find("rep-1")
    assert [charge.id for charge in found] == ["pay_1", "pay_4"]
    assert [what.url.partition("?")[2] for what in script.requests] == [
        "externalReference=rep-1&limit=100&offset=0",
        "externalReference=rep-1&limit=100&offset=100",
    ]
    assert {(what.body, what.repeatable) for what in script.requests} == {(b"", True)}


async def test_list_without_an_end_is_given_up() -> None:
    """A gateway gone mad costs an attempt and not the process."""
    script = Script(lambda what: listed(more=True))
    with pytest.raises(Retry, match="more than 2000"):
        await calls(script).find("rep-1")
    assert len(script.requests) == 20


# ---- whose parts they are


def test_parts_of_a_plan_are_one_charge_in_their_order() -> None:
    """However they were listed."""
    parts = [Part.model_validate(payment(n, installment="plan", installmentNumber=n)) for n in (3, 1, 2)]
    [charge] = charges(parts)
    assert (charge.id, [part.number for part in charge.parts], charge.is_plan) == ("plan", [1, 2, 3], True)
    assert charge.total == Decimal("300.3")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (payment(2, dateCreated="2026-11-30"), payment(1)),
        (payment(9), payment(10)),
        (payment(2, status="RECEIVED"), payment(1)),
        (payment(1, invoiceNumber=None), payment(2, invoiceNumber=None)),
    ],
    ids=["day", "number", "paid", "id"],
)
def test_the_one_to_keep_comes_first(first: dict[str, Any], second: dict[str, Any]) -> None:
    """What is paid, then the older one; and two who look at the same choose the same."""
    for order in ((first, second), (second, first)):
        kept = charges(Part.model_validate(each) for each in order)[0]
        assert kept.id == first["id"]


def test_created_payment_is_there_once_whether_or_not_it_is_listed() -> None:
    """A list may come late."""
    one = Part.model_validate(payment(1))
    assert merged([], one) == merged([Charge("pay_1", (one,))], one) == [Charge("pay_1", (one,))]


# ---- what answers mean


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 502, 503, 302, 405, 413])
async def test_answer_is_no_fault_of_the_request_when_all_get_it(status: int) -> None:
    """Another attempt may help; a fault of the gateway is named for the breaker."""
    script = Script(lambda what: Answer(status, "x", retry_after="7" if status in {429, 503} else None))
    with pytest.raises(Retry) as caught:
        await calls(script).create(ORDER)
    assert caught.value.fault == (None if status in {302, 405, 413} else f"HTTP {status}")
    assert caught.value.not_before == (7.0 if status in {429, 503} else 0.0)
    assert not caught.value.in_doubt


async def test_error_says_codes_and_descriptions_without_secrets() -> None:
    """And no more than people need."""
    errors = [
        {"code": "invalid_customer", "description": f"Customer inválido, chave {TOKEN}, fale com ana@example.com"},
        {"code": "invalid_value", "description": "x" * 5000},
    ]
    script = answering(Answer(400, json.dumps({"errors": errors})))
    with pytest.raises(Refused) as caught:
        await calls(script).create(ORDER)
    text = str(caught.value)
    assert text.startswith("HTTP 400: invalid_customer: Customer inválido, chave ***, fale com a***@e***")
    assert len(text) < 400


@pytest.mark.parametrize(
    "body", ["", "{", "[]", "null", '{"data": 1}', '{"data": [{}]}', '{"data": [{"id": "pay_1"}]}', "[" * 100_000]
)
async def test_answer_costs_an_attempt_when_it_is_not_as_documented(body: str) -> None:
    """It is never taken for "there is none"."""
    with pytest.raises(Retry):
        await calls(answering(Answer(200, body))).find("rep-1")


@pytest.mark.parametrize(("method", "in_doubt"), [("find", False), ("create", True), ("cancel", True)])
async def test_lost_answer_leaves_a_doubt_only_where_something_may_have_changed(method: str, in_doubt: bool) -> None:
    """A question that was not answered has changed nothing."""

    def lost(what: RequestDescription) -> Answer:
        raise SendFailed("timeout: no whole answer within 5 s", "timeout", True)

    ours = calls(Script(lost))
    with pytest.raises(Retry) as caught:
        await (ours.create(ORDER) if method == "create" else getattr(ours, method)("pay_1"))
    assert (caught.value.fault, caught.value.in_doubt) == ("timeout", in_doubt)


# ---- cancelling


@pytest.mark.parametrize(
    "answers",
    [
        [Answer(200, '{"deleted": true, "id": "pay_1"}')],
        [Answer(404, "")],
        [Answer(400, '{"errors": []}'), Answer(200, json.dumps(payment(deleted=True)))],
        [Answer(400, '{"errors": []}'), Answer(404, "")],
    ],
    ids=["removed", "unknown", "removed before", "gone"],
)
async def test_charge_is_cancelled_when_it_is_not_there_any_more(answers: list[Answer]) -> None:
    """Who cancelled it does not matter."""
    await calls(answering(*answers)).cancel("pay_1")


async def test_charge_is_not_cancelled_when_the_gateway_refuses_and_still_has_it() -> None:
    """Its own words say why."""
    refused = Answer(400, '{"errors": [{"code": "invalid_action", "description": "paga"}]}')
    with pytest.raises(Refused, match="invalid_action: paga"):
        await calls(answering(refused, Answer(200, json.dumps(payment(status="RECEIVED"))))).cancel("pay_1")


async def test_id_of_a_charge_cannot_lead_elsewhere() -> None:
    """It comes from a table that others write."""
    script = answering(Answer(404, ""))
    await calls(script).cancel("../customers/cus_1?x=")
    assert script.requests[0].url == "https://api.example.com/v3/payments/..%2Fcustomers%2Fcus_1%3Fx%3D"
