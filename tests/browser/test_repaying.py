"""A repayment asked for on the page, and what then comes of it at the gateway and at the partner."""

import re
from collections.abc import AsyncIterator

import pytest_asyncio
from playwright.async_api import expect

from streams.testing import eventually
from tests.browser.conftest import People, Person, signed_in
from tests.support.asaas import Asaas
from tests.support.page import AdminPage
from tests.support.receiver import Receiver
from tests.support.repayments import Repaying, due
from tests.support.sites import Site

TRACE = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01")


@pytest_asyncio.fixture(loop_scope="session")
async def asaas() -> AsyncIterator[Asaas]:
    """The payment gateway."""
    async with Asaas() as asaas:
        yield asaas


async def ask(ana: Person, original: int | None, value: str = "100,00", parts: int = 3) -> str:
    """Fill the form in and send it; the reference that was in it."""
    await ana.open("/requests")
    await ana.tab.get_by_role("link", name="Solicitar reparcelamento").click()
    await ana.tab.get_by_label("Pagamento original").fill(str(original or ""))
    await ana.tab.get_by_label("Valor (R$)").fill(value)
    await ana.tab.get_by_label("Parcelas").fill(str(parts))
    await ana.tab.get_by_label("Primeiro vencimento").fill(due().isoformat())
    reference = await ana.tab.get_by_label("Referência").input_value()
    await ana.tab.get_by_role("button", name="Solicitar").click()
    return reference


async def test_request_on_the_page_ends_at_the_partner_under_one_trace(
    site: Site, person: People, asaas: Asaas, receiver: Receiver
) -> None:
    """Page, stream, gateway, one transaction, outbox, POST: and the page shows each step."""
    charges = asaas.charge(parts=2)
    async with Repaying(site, asaas, receiver) as desk, signed_in(person, site) as (admin, ana):
        payment = await desk.payment(charges, product_slug="curso-de-teatro")
        reference = await ask(ana, payment)
        await expect(ana.tab.get_by_role("heading", name="Solicitado")).to_be_visible()
        trace = await ana.tab.locator("dd", has_text=TRACE).inner_text()
        await desk.is_now("sent", reference)
        await heard(receiver, 1)
        assert {call.headers["traceparent"] for call in asaas.calls} == {trace}
        assert receiver.requests[0].headers["traceparent"] == trace
        await all_events_sent(admin)

        await ana.tab.get_by_role("link", name="Acompanhar o pedido").click()
        await expect(ana.tab.locator("tbody .badge")).to_have_text("concluído")
        await ana.tab.locator("tbody a").click()
        await expect(ana.tab.locator("main")).to_contain_text(trace)
        await expect(ana.tab.get_by_role("heading", name="Pagamento novo")).to_be_visible()
        for part in asaas.live(reference):
            await expect(ana.tab.locator("main")).to_contain_text(str(part["id"]))
        await expect(ana.tab.locator("section", has_text="Pagamento original")).to_contain_text("reparcelado")
        await ana.picture("request")
        await ana.tab.get_by_role("link", name="eventos desta referência").click()
        await expect(ana.tab.locator("tbody tr")).to_have_count(1)
        await ana.tab.locator("tbody a").click()
        await expect(ana.tab.locator("main")).to_contain_text(trace)
    assert len(asaas.live(reference)) == 3
    assert asaas.live("old") == []


async def heard(receiver: Receiver, requests: int) -> None:
    """Wait until the partner has heard so many times."""

    def has_heard() -> None:
        assert len(receiver.requests) == requests

    await eventually(has_heard, 60)


async def all_events_sent(admin: AdminPage) -> None:
    """Wait until there are events, and all of them are recorded as sent."""

    async def are_sent() -> None:
        rows = await admin.sql("SELECT status FROM outbox_events")
        assert {row["status"] for row in rows} == {"sent"}

    await eventually(are_sent, 60)


async def test_page_answers_before_anybody_has_looked_at_the_request(
    services_site: Site, person: People, asaas: Asaas
) -> None:
    """It is in the stream, and that is all: no call to the gateway, no row. Sent again, it is the same request."""
    async with (
        Repaying(services_site, asaas, processors=("repayments",)) as desk,
        signed_in(person, services_site) as (admin, ana),
    ):
        payment = await desk.payment(asaas.charge())
        await desk.stop()
        reference = await ask(ana, payment, parts=1)
        await expect(ana.tab.get_by_role("heading", name="Solicitado")).to_be_visible()
        assert asaas.calls == []
        assert await admin.sql("SELECT id FROM repayment_requests") == []
        await ana.tab.reload()  # the form is sent again
        await expect(ana.tab.get_by_text(reference, exact=True)).to_be_visible()
        await desk.start()
        await desk.read(2)
        await desk.is_now("sent", reference)
        assert len(await desk.sql("SELECT id FROM repayments")) == 1
    assert len(asaas.live(reference)) == 1


async def test_form_that_cannot_be_right_is_shown_again_with_what_was_typed(
    embedded_site: Site, person: People
) -> None:
    """The field is named, nothing is written."""
    async with signed_in(person, embedded_site) as (admin, ana):
        before = await stored(admin)
        for original, value, says in ((None, "100,00", "Cliente:"), (7, "mil reais", "Valor:"), (7, "0,00", "Valor:")):
            reference = await ask(ana, original, value)
            await expect(ana.tab.get_by_role("alert")).to_contain_text(says)
            await expect(ana.tab.get_by_label("Valor (R$)")).to_have_value(value)
            await expect(ana.tab.get_by_label("Referência")).to_have_value(reference)
        assert await stored(admin) == before


async def stored(admin: AdminPage) -> int:
    """How many requests the stream holds."""
    [partition] = await admin.log.partitions(admin.settings.repayment_requests_stream)
    return (await admin.log.bounds(partition)).next


async def test_request_for_a_payment_that_does_not_exist_is_a_dead_letter_on_the_page(
    embedded_site: Site, person: People, asaas: Asaas
) -> None:
    """The page could not know; the processor says so, with its reason."""
    async with Repaying(embedded_site, asaas) as desk, signed_in(person, embedded_site) as (_, ana):
        reference = await ask(ana, 4711)
        await desk.is_now("failed", reference)
        await ana.open("/letters")
        await expect(ana.tab.locator("tbody tr")).to_have_count(1)
        await expect(ana.tab.locator("tbody")).to_contain_text("pagamento desconhecido")
        await ana.tab.locator("tbody a[href^='/requests/']").click()
        await expect(ana.tab.locator("main")).to_contain_text(reference)
        await expect(ana.tab.locator(".facts .badge")).to_have_text("falhou")
        await ana.tab.get_by_role("button", name="Repetir").click()
        await expect(ana.tab.get_by_role("status")).to_contain_text("1 de volta à espera")
    assert asaas.live(reference) == []
