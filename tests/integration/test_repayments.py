"""A repayment as a whole: from its request to the partner, with a gateway that behaves as the real one."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from streams.message import Message
from streams.testing import eventually
from tests.support.asaas import CUSTOMER, Asaas, Call, Trouble
from tests.support.receiver import Receiver
from tests.support.repayments import PARTNER_TOKEN, Repaying, a_request, due
from tests.support.sites import Site

SCHEMA = json.loads(Path(__file__).parents[2].joinpath("docs/schemas/repayment_sync.schema.json").read_text())
CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
COUNT = 12
NOTHING = {"payments": 0, "installments": 0, "repayments": 0, "outbox_events": 0, "audits": 0}
FAST: dict[str, Any] = {"BACKOFF_SECONDS": "0.1"}
STATEMENTS = (
    "UPDATE ON payments",
    "UPDATE ON installments",
    "INSERT ON payments",
    "INSERT ON installments",
    "INSERT ON repayments",
    "INSERT ON audits",
    "INSERT ON outbox_events",
    "UPDATE ON repayment_requests",
)
"""Of the transaction that records a repayment, all but the lock."""


@pytest.fixture
async def asaas() -> AsyncIterator[Asaas]:
    """The payment gateway."""
    async with Asaas() as asaas:
        yield asaas


def the_next(trouble: Trouble, wanted: Callable[[Call], bool], times: int = 1) -> Callable[[Call], Trouble | None]:
    """So many of the requests that are meant go wrong."""
    left = iter([trouble] * times)
    return lambda call: next(left, None) if wanted(call) else None


def posts(call: Call) -> bool:
    """The creation of a charge."""
    return call.method == "POST"


def deletes(call: Call) -> bool:
    """The cancellation of one."""
    return call.method == "DELETE"


# ---- brought about


async def test_partner_hears_of_a_repayment_when_it_is_asked_for(site: Site, asaas: Asaas) -> None:
    """Request, stream, gateway, one transaction, outbox, partner: one trace through all of it."""
    old = asaas.charge(parts=2)
    async with Receiver() as partner, Repaying(site, asaas, partner) as desk:
        payment = await desk.payment(old, product_slug="curso-de-teatro")
        await desk.ask(a_request(parts=3, customer=None, original_payment=payment), traceparent=CONTEXT)
        row = await desk.is_now("sent")
        assert (row["attempts"], row["doubts"], row["last_error"], row["traceparent"]) == (1, 0, None, CONTEXT)
        await eventually(lambda: _is(len(partner.requests), 1))
        assert await desk.payment_status(payment) == "renegotiated"
        assert await desk.written() == {
            "payments": 1, "installments": 5, "repayments": 1, "outbox_events": 1, "audits": 1,
        }  # fmt: skip
        [audit] = await desk.sql("SELECT * FROM audits WHERE auditable_type LIKE '%Payment'")
    live = asaas.live("rep-1")
    assert [part["installmentNumber"] for part in live] == [1, 2, 3]
    assert asaas.live("old") == []
    [heard] = partner.requests
    payload = json.loads(heard.body)
    jsonschema.validate(payload, SCHEMA)
    assert payload == {
        "event_reference": "repayment_sync:rep-1",
        "repayment": {
            "reference": "rep-1", "value": "100.00", "billing_type": "BOLETO", "status": "open",
            "due_date": due().isoformat(), "gateway_id": live[0]["installment"],
        },
        "customer": {"gateway_id": CUSTOMER},
        "product_slug": "curso-de-teatro",
        "original_payment": {"id": payment, "reference": "old", "status": "renegotiated"},
        "installments": [
            {"number": n, "value": value, "due_date": part["dueDate"], "gateway_id": part["id"]}
            for n, (value, part) in enumerate(zip(["33.33", "33.33", "33.34"], live, strict=True), 1)
        ],
    }  # fmt: skip
    assert (heard.path, heard.headers["authorization"]) == ("/v1/sync/repayments", f"Bearer {PARTNER_TOKEN}")
    assert heard.headers["traceparent"] == CONTEXT
    assert {call.headers["traceparent"] for call in asaas.calls} == {CONTEXT}
    assert (audit["event"], audit["auditable_id"], audit["tags"]) == ("updated", payment, "afluente repayment by ana")
    assert json.loads(audit["old_values"]) == {"status": "open"}
    assert json.loads(audit["new_values"])["status"] == "renegotiated"


@pytest.mark.parametrize("parts", [0, 1, 2])
@pytest.mark.parametrize("with_original", [False, True])
async def test_payload_fits_its_contract_when_parts_of_it_are_left_out(
    embedded_site: Site, asaas: Asaas, parts: int, with_original: bool
) -> None:
    """With and without original payment, product and installments; and money is text with two decimals."""
    async with Repaying(embedded_site, asaas, processors=("repayments",)) as desk:
        original = await desk.payment(asaas.charge()) if with_original else None
        slug = None if with_original else "oficina"
        await desk.ask(a_request(parts=parts, original_payment=original, product_slug=slug))
        await desk.is_now("sent")
        [payload] = await desk.payloads()
    jsonschema.validate(payload, SCHEMA)
    assert ("original_payment" in payload, "product_slug" in payload) == (with_original, not with_original)
    assert len(payload["installments"]) == (parts if parts > 1 else 0)
    [made] = [call.body for call in asaas.calls if call.method == "POST"]
    assert ("installmentCount" in made) == (parts > 1)
    assert len(asaas.live("rep-1")) == max(1, parts)


async def test_a_repayment_can_be_split_anew_itself(embedded_site: Site, asaas: Asaas) -> None:
    """What came of the first request is an ordinary payment with its own charges."""
    async with Repaying(embedded_site, asaas, processors=("repayments",)) as desk:
        await desk.ask(a_request(parts=2))
        await desk.is_now("sent")
        [payment] = await desk.sql("SELECT id FROM payments")
        await desk.ask(a_request("rep-2", original_payment=payment["id"]))
        await desk.is_now("sent", "rep-2")
        states = await desk.sql("SELECT status FROM installments ORDER BY number")
        assert await desk.payment_status(payment["id"]) == "renegotiated"
    assert [row["status"] for row in states] == ["cancelled", "cancelled"]
    assert (len(asaas.live("rep-1")), len(asaas.live("rep-2"))) == (0, 1)


# ---- once


async def test_one_charge_is_made_when_a_reference_is_asked_for_again_and_again(site: Site, asaas: Asaas) -> None:
    """At once, later, with another content, and by a replay from 0."""
    async with Repaying(site, asaas, processors=("outbox_relay", "repayments")) as desk:
        await desk.ask(*[a_request()] * 5)
        await desk.is_now("sent")
        await desk.ask(a_request(), a_request(value="999.00"))
        await desk.read(7)
        await desk.replay("repayments")
        await desk.read(7)
        assert (await desk.request())["claim_no"] == 1
        assert await desk.written() == NOTHING | {"payments": 1, "repayments": 1, "outbox_events": 1, "audits": 1}
    assert (asaas.made("POST"), len(asaas.payments)) == (1, 1)


async def test_two_references_are_two_repayments(site: Site, asaas: Asaas) -> None:
    """Equal in all else."""
    async with Repaying(site, asaas, processors=("repayments",)) as desk:
        await desk.ask(a_request("rep-1"), a_request("rep-2"))
        await desk.is_now("sent", "rep-1")
        await desk.is_now("sent", "rep-2")
    assert len(asaas.payments) == 2


async def test_first_request_wins_when_two_are_for_one_payment(site: Site, asaas: Asaas) -> None:
    """The other one is a dead letter that names it, and has made no charge."""
    async with Repaying(site, asaas, processors=("repayments",), REPAYMENTS_SLOTS=4) as desk:
        payment = await desk.payment(asaas.charge())
        asaas.may_answer.clear()
        await desk.ask(a_request("rep-1", original_payment=payment))
        await eventually(lambda: _is(asaas.waiting, 1))
        await desk.ask(a_request("rep-2", original_payment=payment))
        second = await desk.is_now("failed", "rep-2")
        asaas.may_answer.set()
        await desk.is_now("sent", "rep-1")
        letter = await desk.letter_of("another_request")
    assert "(rep-1) for it is under way" in second["last_error"]
    assert letter["message_key"] == "rep-2"
    assert asaas.live("rep-2") == []


# ---- refused


async def unknown(desk: Repaying) -> dict[str, Any]:
    """A payment that does not exist."""
    return {"original_payment": 999}


async def paid(desk: Repaying) -> dict[str, Any]:
    """A payment that has been paid."""
    return {"original_payment": await desk.payment(desk.asaas.charge(status="RECEIVED"), status="paid")}


async def renegotiated(desk: Repaying) -> dict[str, Any]:
    """A payment that has been split anew."""
    return {"original_payment": await desk.payment(desk.asaas.charge(), status="renegotiated")}


async def cancelled(desk: Repaying) -> dict[str, Any]:
    """A payment that somebody has cancelled."""
    return {"original_payment": await desk.payment(desk.asaas.charge(), status="cancelled")}


async def of_somebody_else(desk: Repaying) -> dict[str, Any]:
    """A payment of another customer."""
    return {"original_payment": await desk.payment(desk.asaas.charge(), customer="cus_2")}


async def past(desk: Repaying) -> dict[str, Any]:
    """A due date that is over."""
    return {"due_date": due(-2)}


def _parts(*parts: tuple[str, int]) -> list[dict[str, Any]]:
    return [{"number": n, "value": value, "due_date": due(day)} for n, (value, day) in enumerate(parts, 1)]


async def not_summing_up(desk: Repaying) -> dict[str, Any]:
    """A cent is missing."""
    return {"installments": _parts(("50.00", 10), ("49.99", 40))}


async def uneven(desk: Repaying) -> dict[str, Any]:
    """A split that the gateway does not make."""
    return {"installments": _parts(("90.00", 10), ("10.00", 41))}


async def too_early(desk: Repaying) -> dict[str, Any]:
    """A first installment before the due date."""
    return {"installments": _parts(("50.00", 9), ("50.00", 40))}


@pytest.mark.parametrize(
    ("case", "reason", "says"),
    [
        (unknown, "unknown_payment", "original_payment: there is no payment 999"),
        (paid, "paid_already", "is paid"),
        (renegotiated, "renegotiated_already", "is renegotiated"),
        (cancelled, "cancelled_already", "is cancelled"),
        (of_somebody_else, "customer_differs", "customer: payment"),
        (past, "past_due_date", "due_date: "),
        (not_summing_up, "installments_do_not_sum_up", "installments: 99.99 in all, not 100.00"),
        (uneven, "installments_not_offered", "installments: the gateway makes number 1 50.00"),
        (too_early, "installments_not_offered", "installments: the first must be due on due_date"),
    ],
)
async def test_request_is_a_dead_letter_and_touches_nothing_when_it_is_invalid(
    site: Site, asaas: Asaas, case: Any, reason: str, says: str
) -> None:
    """Final at once, with its reason, its row and its field; the gateway is not even asked."""
    async with Repaying(site, asaas, processors=("repayments",)) as desk:
        await desk.ask(a_request(**await case(desk)))
        row = await desk.is_now("failed")
        letter = await desk.letter_of(reason)
        assert await desk.written() == NOTHING
    assert (row["attempts"], letter["attempts"], letter["row_id"], letter["message_key"]) == (1, 1, row["id"], "rep-1")
    assert says in row["last_error"]
    assert says in letter["error"]
    assert asaas.calls == []


@pytest.mark.parametrize(
    ("message", "reason", "says"),
    [
        (Message("x", "repayment.request", 1, 1, b"{"), "invalid_request", "not JSON"),
        (
            Message("x", "repayment.request", 1, 1, b'{"reference": "x"}'),
            "invalid_request",
            "billing_type: is required",
        ),
        (Message("x", "repayment.request", 1, 1, a_request().to_json()), "bad_message", "its reference"),
        (Message("x", "repayment.request", 2, 1, b"{}"), "unknown_type", "version 2"),
        (Message("rep", "repayment.retry", 1, 1, b"{}"), "bad_message", "id of a row"),
    ],
)
async def test_record_is_a_dead_letter_when_it_is_no_request(
    embedded_site: Site, asaas: Asaas, message: Message, reason: str, says: str
) -> None:
    """No row is made of it; the next request goes on."""
    async with Repaying(embedded_site, asaas, processors=("repayments",)) as desk:
        await desk.put(message.encode(), stream=desk.settings.repayment_requests_stream)
        await desk.ask(a_request("good"))
        await desk.is_now("sent", "good")
        letter = await desk.letter_of(reason)
    assert (letter["row_id"], letter["processor"]) == (None, "repayments")
    assert says in letter["error"]
    assert len(asaas.payments) == 1


async def test_request_is_refused_when_the_gateway_knows_that_the_original_is_paid(
    embedded_site: Site, asaas: Asaas
) -> None:
    """Our tables have not heard of it yet: nothing is created."""
    async with Repaying(embedded_site, asaas, processors=("repayments",)) as desk:
        payment = await desk.payment(asaas.charge(status="CONFIRMED"))
        await desk.ask(a_request(original_payment=payment))
        row = await desk.is_now("failed")
        await desk.letter_of("paid_already")
        assert await desk.payment_status(payment) == "open"
    assert "is CONFIRMED at the gateway" in row["last_error"]
    assert asaas.made("POST") == 0


@pytest.mark.parametrize("asked", [1, None], ids=["the original itself", "another one"])
async def test_request_is_refused_when_a_payment_has_its_reference(site: Site, asaas: Asaas, asked: int | None) -> None:
    """Its charge would be taken for the new one, and cancelled as the original's; the gateway is not even asked."""
    async with Repaying(site, asaas, processors=("repayments",)) as desk:
        payment = await desk.payment(asaas.charge("rep-1"), reference="rep-1")
        await desk.ask(a_request(original_payment=asked))
        row = await desk.is_now("failed")
        await desk.letter_of("reference_taken")
        assert await desk.payment_status(payment) == "open"
        assert await desk.written() == NOTHING | {"payments": 1}
    assert row["last_error"] == f"reference_taken: reference: payment {payment} has it already"
    assert asaas.calls == []


async def test_charge_of_another_payment_is_left_alone_when_it_has_the_reference(site: Site, asaas: Asaas) -> None:
    """At the gateway the original goes by the reference that is asked for: it is not taken for the new charge."""
    async with Repaying(site, asaas, processors=("repayments",)) as desk:
        payment = await desk.payment(asaas.charge("rep-1"))
        await desk.ask(a_request(original_payment=payment))
        row = await desk.is_now("failed")
        await desk.letter_of("reference_taken")
        assert await desk.payment_status(payment) == "open"
        assert (await desk.written())["repayments"] == 0
    [theirs] = asaas.live("rep-1")
    assert f"its charge {theirs['id']} is that of another payment" in row["last_error"]
    assert (asaas.made("POST"), asaas.made("DELETE")) == (0, 0)


async def test_charge_of_another_payment_is_left_alone_when_a_request_is_withdrawn(
    embedded_site: Site, asaas: Asaas
) -> None:
    """What a later try takes back is what was made for the request, and nothing that is written down."""
    async with Repaying(embedded_site, asaas, processors=("outbox_relay", "repayments"), **FAST) as desk:
        payment = await desk.payment(asaas.charge("rep-1"))
        asaas.script = lambda call: Trouble(500)
        await desk.ask(a_request(original_payment=payment))
        await desk.is_now("failed")
        asaas.script = lambda call: None
        await desk.sql("UPDATE payments SET status = 'paid'")
        await desk.sql("UPDATE repayment_requests SET status = 'pending', attempts = 0")

        async def is_refused() -> None:
            row = await desk.request()
            assert row["last_error"].startswith("paid_already"), row

        await eventually(is_refused)
    assert (len(asaas.live("rep-1")), asaas.made("DELETE")) == (1, 0)


async def test_request_is_a_dead_letter_at_once_when_the_gateway_refuses_it(embedded_site: Site, asaas: Asaas) -> None:
    """With its code and description; another try would end alike."""
    async with Repaying(embedded_site, asaas, processors=("repayments",)) as desk:
        await desk.ask(a_request(customer="cus_unknown"))
        row = await desk.is_now("failed")
        await desk.letter_of("refused_by_gateway")
    assert "HTTP 400: invalid_customer: Customer inválido ou não informado." in row["last_error"]
    assert asaas.made("POST") == 1


# ---- the gateway in trouble


@pytest.mark.parametrize(
    "trouble",
    [Trouble(500), Trouble(503, headers={"Retry-After": "0"}), Trouble(429), Trouble(401, b'{"errors": []}')],
    ids=lambda trouble: trouble.status,
)
@pytest.mark.parametrize("wanted", [posts, deletes, lambda call: call.method == "GET"], ids=["POST", "DELETE", "GET"])
async def test_request_is_tried_again_when_the_gateway_is_in_trouble(
    embedded_site: Site, asaas: Asaas, trouble: Trouble, wanted: Any
) -> None:
    """One attempt each, and one charge in the end."""
    asaas.script = the_next(trouble, wanted)
    async with Repaying(embedded_site, asaas, processors=("outbox_relay", "repayments"), **FAST) as desk:
        payment = await desk.payment(asaas.charge())
        await desk.ask(a_request(original_payment=payment))
        row = await desk.is_now("sent")
    assert row["attempts"] == 2
    assert (len(asaas.live("rep-1")), len(asaas.live("old"))) == (1, 0)


async def test_charge_is_found_and_not_made_again_when_the_answer_was_lost(site: Site, asaas: Asaas) -> None:
    """It was created; the connection broke before the answer."""
    asaas.script = the_next(Trouble(lose=True), posts)
    async with Repaying(site, asaas, processors=("outbox_relay", "repayments"), **FAST) as desk:
        await desk.ask(a_request(parts=2))
        row = await desk.is_now("sent")
    assert (row["attempts"], row["doubts"]) == (2, 1)
    assert (asaas.made("POST"), len(asaas.payments)) == (1, 2)


async def test_cancelled_counts_as_cancelled_when_its_answer_was_lost(embedded_site: Site, asaas: Asaas) -> None:
    """The gateway says at the second try that it is removed already; one that never existed is gone as well."""
    asaas.script = the_next(Trouble(lose=True), deletes)
    async with Repaying(embedded_site, asaas, processors=("outbox_relay", "repayments"), **FAST) as desk:
        payment = await desk.payment([*asaas.charge(), "pay_unknown"])
        await desk.ask(a_request(original_payment=payment))
        await desk.is_now("sent")
        assert await desk.payment_status(payment) == "renegotiated"
    assert asaas.made("POST") == 1


async def test_younger_charge_is_cancelled_when_there_are_two(site: Site, asaas: Asaas) -> None:
    """However that came about: the older one is the repayment."""
    older = asaas.charge("rep-1", parts=2)
    asaas.charge("rep-1", parts=2)
    async with Repaying(site, asaas, processors=("repayments",)) as desk:
        await desk.ask(a_request(parts=2))
        await desk.is_now("sent")
        [payload] = await desk.payloads()
    assert [part["id"] for part in asaas.live("rep-1")] == older
    assert [part["gateway_id"] for part in payload["installments"]] == older
    assert asaas.made("POST") == 0


async def test_one_charge_is_left_when_two_holders_of_a_request_create_at_once(site: Site, asaas: Asaas) -> None:
    """The first one stood still for longer than its lease, right before its POST: its charge is cancelled again."""
    goes_on = asyncio.Event()
    held: list[Call] = []

    def hold(call: Call) -> asyncio.Event | None:
        if call.method != "POST" or held:
            return None
        held.append(call)
        return goes_on

    asaas.holds = hold
    patient: dict[str, Any] = {"ACT_TIMEOUT_SECONDS": "40", "ASAAS_TIMEOUT_SECONDS": "40"}
    async with Repaying(site, asaas, processors=("repayments",), **patient) as desk:
        await desk.ask(a_request(parts=2))
        await eventually(lambda: _is(len(held), 1))
        row = await desk.request()
        await desk.sql("UPDATE repayment_requests SET lease_until = created_at")
        hint = Message(str(row["id"]), "repayment.retry", 1, 2, b"{}").encode()
        await desk.put(hint, stream=desk.settings.repayment_requests_stream)
        await desk.is_now("sent")
        goes_on.set()
        await desk.read(2)
        await eventually(lambda: _is(sum(payment["deleted"] for payment in asaas.payments.values()), 2))
        await desk.stop()
        assert await desk.written() == {
            "payments": 1, "installments": 2, "repayments": 1, "outbox_events": 1, "audits": 1,
        }  # fmt: skip
        [payload] = await desk.payloads()
    assert [part["gateway_id"] for part in payload["installments"]] == [part["id"] for part in asaas.live("rep-1")]
    assert asaas.made("POST") == 2


async def test_new_charge_counts_when_the_gateways_list_does_not_show_it_yet(embedded_site: Site, asaas: Asaas) -> None:
    """The answer to the creation is as good."""
    asaas.hidden = 1
    async with Repaying(embedded_site, asaas, processors=("repayments",)) as desk:
        await desk.ask(a_request())
        assert (await desk.is_now("sent"))["attempts"] == 1
    assert len(asaas.payments) == 1


async def test_repayment_waits_until_all_parts_of_its_plan_are_shown(embedded_site: Site, asaas: Asaas) -> None:
    """Nothing is created a second time meanwhile."""

    def show(call: Call) -> None:
        asaas.hidden = 0 if asaas.made("GET") > 2 else 1

    asaas.script = show
    async with Repaying(embedded_site, asaas, processors=("outbox_relay", "repayments"), **FAST) as desk:
        await desk.ask(a_request(parts=3))
        row = await desk.is_now("sent")
        assert (await desk.written())["installments"] == 3
    assert (row["attempts"], len(asaas.payments)) == (2, 3)


async def test_request_is_failed_and_names_both_charges_when_the_original_cannot_be_cancelled(
    site: Site, asaas: Asaas
) -> None:
    """The customer pays the old one just then: nothing says that it is done, and nothing is lost track of."""
    [old] = asaas.charge()

    def pays(call: Call) -> None:
        if call.method == "DELETE":
            asaas.payments[old]["status"] = "RECEIVED"

    asaas.script = pays
    async with Repaying(site, asaas, processors=("outbox_relay", "repayments"), **FAST) as desk:
        payment = await desk.payment([old])
        await desk.ask(a_request(original_payment=payment))
        row = await desk.is_now("failed")
        letter = await desk.letter_of("attempts_used_up")
        assert await desk.payment_status(payment) == "open"
        assert await desk.written() == NOTHING
    [new] = asaas.live("rep-1")
    assert row["attempts"] == 3
    for text in (row["last_error"], letter["error"]):
        assert f"the original's charge {old} is not cancelled; the new charge {new['id']} exists" in text
    assert asaas.made("POST") == 1


async def test_new_charge_is_named_when_what_follows_its_creation_fails(embedded_site: Site, asaas: Asaas) -> None:
    """Also by a look-up that gets no answer."""
    asaas.script = lambda call: Trouble(500) if call.method == "GET" and asaas.payments else None
    async with Repaying(embedded_site, asaas, processors=("repayments",), MAX_ATTEMPTS=1) as desk:
        await desk.ask(a_request())
        row = await desk.is_now("failed")
    [new] = asaas.live("rep-1")
    assert f"the new charge {new['id']} exists" in row["last_error"]


@pytest.mark.parametrize("tries", [1, 2])
async def test_repayment_goes_on_when_somebody_has_marked_its_original_as_cancelled(
    site: Site, asaas: Asaas, tries: int
) -> None:
    """The gateway tells others of the cancellation, who may be faster than our transaction."""
    async with Repaying(site, asaas, processors=("outbox_relay", "repayments"), **FAST) as desk:
        payment = await desk.payment(asaas.charge())
        if tries == 2:
            asaas.script = the_next(Trouble(500), deletes)
        marked = asyncio.Event()
        asaas.holds = lambda call: marked if call.method == "DELETE" else None
        await desk.ask(a_request(original_payment=payment))
        await eventually(lambda: _is(asaas.waiting, 1))
        await desk.sql("UPDATE payments SET status = 'cancelled'")
        marked.set()
        await desk.is_now("sent")
        assert await desk.payment_status(payment) == "renegotiated"
    assert (asaas.made("POST"), len(asaas.live("rep-1"))) == (1, 1)


async def test_failed_request_goes_on_where_it_was_when_it_is_retried(site: Site, asaas: Asaas) -> None:
    """By a plain UPDATE once the gateway lets the original go: the charge that exists is the repayment."""
    asaas.script = lambda call: Trouble(500) if call.method == "DELETE" else None
    async with Repaying(site, asaas, processors=("outbox_relay", "repayments"), **FAST) as desk:
        payment = await desk.payment(asaas.charge())
        await desk.ask(a_request(original_payment=payment))
        await desk.is_now("failed")
        asaas.script = lambda call: None
        await desk.sql("UPDATE repayment_requests SET status = 'pending', attempts = 0")
        await desk.is_now("sent")
    assert (asaas.made("POST"), len(asaas.live("rep-1")), len(asaas.live("old"))) == (1, 1, 0)


async def test_own_charge_is_cancelled_when_the_request_may_not_go_on(embedded_site: Site, asaas: Asaas) -> None:
    """The original was paid between two attempts: the customer does not owe the new one as well."""
    asaas.script = lambda call: Trouble(500) if call.method == "DELETE" else None
    async with Repaying(embedded_site, asaas, processors=("outbox_relay", "repayments"), **FAST) as desk:
        payment = await desk.payment(asaas.charge())
        await desk.ask(a_request(original_payment=payment))
        await desk.is_now("failed")
        [new] = asaas.live("rep-1")
        asaas.script = lambda call: None
        await desk.sql("UPDATE payments SET status = 'paid'")
        await desk.sql("UPDATE repayment_requests SET status = 'pending', attempts = 0")

        async def is_refused() -> None:
            row = await desk.request()
            assert row["last_error"].startswith("paid_already"), row

        await eventually(is_refused)
        assert f"its charge {new['id']} is cancelled" in (await desk.request())["last_error"]
    assert asaas.live("rep-1") == []


async def test_breaker_opens_when_the_gateway_is_away_and_closes_by_itself(embedded_site: Site, asaas: Asaas) -> None:
    """Requests that were not tried have used no attempt."""
    changes: dict[str, Any] = {
        "BREAKER_THRESHOLD": 2,
        "REPAYMENTS_SLOTS": 1,
        "MAX_ATTEMPTS": 9,
        "BREAKER_PROBE_SECONDS": "0.4",
        **FAST,
    }
    asaas.script = lambda call: Trouble(503)
    async with Repaying(embedded_site, asaas, processors=("outbox_relay", "repayments"), **changes) as desk:
        await desk.ask(*[a_request(f"rep-{n}") for n in range(COUNT)])

        async def some_are_spared() -> None:
            rows = await desk.sql("SELECT attempts FROM repayment_requests")
            assert len(rows) == COUNT
            assert desk.metric("afluente_breaker_open", processor="repayments") == 1
            assert sum(row["attempts"] == 0 for row in rows) >= 2

        await eventually(some_are_spared)
        asaas.script = lambda call: None
        for n in range(COUNT):
            await desk.is_now("sent", f"rep-{n}")
    assert len(asaas.payments) == COUNT


# ---- the transaction


async def test_no_half_state_is_left_when_any_statement_of_the_transaction_fails(site: Site, asaas: Asaas) -> None:
    """Each table in turn refuses: no event, no status, no row; the next attempt finds its charge, and all is there."""
    async with Repaying(site, asaas, processors=("outbox_relay", "repayments"), MAX_ATTEMPTS=30, **FAST) as desk:
        for number, statement in enumerate(STATEMENTS):
            reference, old = f"rep-{number}", f"old-{number}"
            payment = await desk.payment(asaas.charge(old, parts=2), reference=old)
            before = await desk.written()
            async with desk.refusing(statement):
                await desk.ask(a_request(reference, parts=2, original_payment=payment))
                row = await desk.has_failed_once(reference)
                assert await desk.written() == before
                assert await desk.payment_status(payment) == "open"
                assert ("the new charge" in row["last_error"]) == (statement != "UPDATE ON repayment_requests")
            await desk.is_now("sent", reference)
            assert await desk.payment_status(payment) == "renegotiated"
            assert len(await desk.payloads()) == number + 1
            assert (len(asaas.live(reference)), asaas.live(old)) == (2, [])
    assert asaas.made("POST") == len(STATEMENTS)


async def test_request_is_failed_and_names_its_charge_when_it_can_never_be_written(site: Site, asaas: Asaas) -> None:
    """The process lives; others are brought about; a person knows which charge to look at."""
    async with Repaying(site, asaas, processors=("outbox_relay", "repayments"), **FAST) as desk:
        async with desk.refusing("INSERT ON outbox_events"):
            await desk.ask(a_request())
            row = await desk.is_now("failed")
            letter = await desk.letter_of("attempts_used_up")
            assert await desk.written() == NOTHING
        await desk.ask(a_request("rep-2"))
        await desk.is_now("sent", "rep-2")
    [charge] = asaas.live("rep-1")
    assert f"the new charge {charge['id']} exists" in row["last_error"]
    assert charge["id"] in letter["error"]
    assert asaas.made("POST") == 2


def _is(value: object, wanted: object) -> None:
    assert value == wanted
