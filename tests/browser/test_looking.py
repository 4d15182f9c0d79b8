"""What an operator finds: lists, filters, searches, one row; on a desk and on a phone; whatever others have written."""

from datetime import UTC, datetime, timedelta

import pytest
from playwright.async_api import expect

from models.outbox import OutboxEvent
from tests.browser.conftest import PHONE, People, signed_in
from tests.support.databases import from_now
from tests.support.page import BATCH, AdminPage, batch, email, event, in_flight, letter_of, position, rejected_item
from tests.support.sites import Site

SCRIPT = "<img src=x onerror=alert(1)>"
TAG = "<script>alert('smtp')</script>"


async def a_day(admin: AdminPage) -> list[int]:
    """Rows as after a bad night; the ids of the events."""
    events: list[OutboxEvent] = [
        event(
            ("sent", "failed", "pending", "sent", "sent")[number % 5],
            payload={
                "event": f"repayment-{number}",
                "repayment": {"reference": f"rep-{number}", "value": "1200.00", "status": "PENDING"},
                "customer": "cus_000005219613",
            },
            created_at=datetime.now(UTC) - timedelta(minutes=300 - 17 * number),
        )
        for number in range(1, 13)
    ]
    ids = await admin.add(*events, in_flight(), event("failed", held=True, doubts=1))
    emails = [email(("sent", "failed", "pending", "sent")[number % 4], number) for number in range(18)]
    await admin.add(*emails, email("failed", 40, held=True, doubts=1, error_message="no reply after the final dot"))
    await admin.sql("UPDATE outbox_events SET status = 'pending', attempts = 0 WHERE id = :id", id=ids[0])
    await admin.sql("UPDATE outbox_events SET status = 'failed', attempts = 3 WHERE id = :id", id=ids[0])
    await admin.add(*batch(41), *(letter_of(ids[n]) for n in (0, 5)), rejected_item(9))
    await admin.add(
        position("splitter", "imports"),
        position("mailer", "recipients", 0),
        position("mailer", "recipients", 1, paused=True, paused_reason="manutenção do provedor"),
        position("sync", "outbox", halted_reason="offset 17 is gone: retention has dropped it"),
    )
    return ids


async def test_overview_names_what_needs_a_person(embedded_site: Site, person: People) -> None:
    """Failed, held, paused, halted, and dead letters, each with its way there."""
    async with signed_in(person, embedded_site) as (admin, ana):
        await a_day(admin)
        await ana.open("/")
        attention = ana.tab.get_by_role("region", name="O que exige atenção")
        await expect(attention.get_by_role("link", name="3 eventos com tentativas esgotadas")).to_be_visible()
        await expect(attention.get_by_role("link", name="1 e-mail à espera de decisão")).to_be_visible()
        await expect(attention.get_by_role("link", name="mailer, partição 1 de recipients: em pausa")).to_be_visible()
        await expect(attention.get_by_role("link", name="sync, partição 0 de outbox: parada")).to_be_visible()
        await expect(attention.get_by_role("link", name="3 mensagens mortas em aberto")).to_be_visible()
        await attention.get_by_role("link", name="3 eventos com tentativas esgotadas").click()
        await expect(ana.tab.locator("tbody tr")).to_have_count(3)


async def test_list_is_narrowed_by_state_name_and_day(embedded_site: Site, person: People) -> None:
    """What the form says, and nothing else, is shown; the form keeps what it said."""
    async with signed_in(person, embedded_site) as (admin, ana):
        await admin.add(event("failed"), event("sent"), event("failed", event_name="other.event"), in_flight())
        await admin.sql(f"UPDATE outbox_events SET created_at = {from_now(admin.engine, -86_400 * 3)} WHERE id = 1")
        await ana.open("/events")
        rows = ana.tab.locator("tbody tr")
        await expect(rows).to_have_count(4)
        await ana.tab.get_by_label("Estado").select_option("falhou")
        await ana.tab.get_by_role("button", name="Filtrar").click()
        await expect(rows).to_have_count(2)
        await ana.tab.locator("select[name=name]").select_option("other.event")
        await ana.tab.get_by_role("button", name="Filtrar").click()
        await expect(rows).to_have_count(1)
        await expect(ana.tab.get_by_label("Estado")).to_have_value("failed")
        await ana.tab.get_by_role("link", name="Limpar").click()
        await expect(rows).to_have_count(4)
        await ana.tab.get_by_label("Estado").select_option("em andamento")
        await ana.tab.get_by_role("button", name="Filtrar").click()
        await expect(rows).to_have_count(1)
        await ana.open("/events?since=2020-01-01&until=2020-01-02")
        await expect(ana.tab.get_by_text("Nenhum evento corresponde a este filtro.")).to_be_visible()
        [day] = await admin.sql("SELECT created_at FROM outbox_events WHERE id = 1")
        until = str(day["created_at"])[:10]
        await ana.open(f"/events?until={until}")
        await expect(rows).to_have_count(1)


async def test_event_is_found_by_its_number_and_by_a_reference_in_its_payload(
    embedded_site: Site, person: People
) -> None:
    """The two things that somebody who calls knows."""
    async with signed_in(person, embedded_site) as (admin, ana):
        ids = await admin.add(*(event(payload={"repayment": {"reference": f"rep-{n}x"}}) for n in range(5)))
        await ana.open("/events")
        search = ana.tab.get_by_label("Número ou referência")
        await search.fill("rep-3x")
        await search.press("Enter")
        await expect(ana.tab.locator("tbody tr")).to_have_count(1)
        await expect(ana.tab.get_by_role("link", name=str(ids[3]), exact=True)).to_be_visible()
        await search.fill(str(ids[1]))
        await search.press("Enter")
        await expect(ana.tab.get_by_role("link", name=str(ids[1]), exact=True)).to_be_visible()


async def test_address_is_searched_and_stands_in_no_address_bar(embedded_site: Site, person: People) -> None:
    """It is somebody's: it is sent in a form, however its letters are written."""
    async with signed_in(person, embedded_site) as (admin, ana):
        await admin.add(email("sent", 1), email("failed", 2), email("sent", 3))
        await ana.open("/emails")
        await ana.tab.get_by_label("Endereço do destinatário").fill("Pessoa2@Example.com")
        await ana.tab.get_by_role("button", name="Procurar endereço").click()
        await expect(ana.tab.locator("tbody tr")).to_have_count(1)
        await expect(ana.tab.locator("tbody")).to_contain_text("pessoa2@example.com")
        assert "pessoa2" not in ana.tab.url.lower()


async def test_long_list_is_turned_page_by_page(embedded_site: Site, person: People) -> None:
    """Fifty at a time, no row twice and none left out."""
    async with signed_in(person, embedded_site) as (admin, ana):
        await admin.add(*(event("sent") for _ in range(120)))
        await ana.open("/events?state=sent")
        numbers = ana.tab.locator("tbody td[data-label='Número'] a")
        seen: list[str] = []
        for first in (120, 70, 20):
            await expect(numbers.first).to_have_text(str(first))
            seen += await numbers.all_inner_texts()
            if first > 20:
                await ana.tab.get_by_role("link", name="Mais antigos").click()
        await expect(ana.tab.get_by_role("link", name="Mais antigos")).to_have_count(0)
        assert seen == [str(number) for number in range(120, 0, -1)]


async def test_detail_shows_payload_error_history_and_dead_letters(embedded_site: Site, person: People) -> None:
    """Indented, with numbers as they were written, and who changed what."""
    async with signed_in(person, embedded_site) as (admin, ana):
        [first] = await admin.add(event("pending", payload={"repayment": {"reference": "rep-1", "value": 10.50}}))
        await admin.sql(
            """UPDATE outbox_events SET status = 'failed', attempts = 3, claim_no = 3, last_error = :error
            WHERE id = :id""",
            id=first,
            error='{"errors":[{"code":422}]}',
        )
        [letter] = await admin.add(letter_of(first))
        await ana.open(f"/events/{first}")
        await expect(ana.tab.get_by_text('"reference": "rep-1"')).to_be_visible()
        await expect(ana.tab.locator("pre", has_text='"value": 10.5')).to_be_visible()
        await expect(ana.tab.locator("pre.why")).to_contain_text('"code": 422')
        await expect(ana.tab.locator(".history")).to_contain_text('"status": "failed"')
        await ana.tab.get_by_role("link", name=str(letter), exact=True).click()
        await expect(ana.tab.get_by_role("heading", name=f"Mensagem morta {letter}")).to_be_visible()
        await expect(ana.tab.get_by_text("aberta")).to_be_visible()


async def test_what_others_have_written_is_shown_as_text(embedded_site: Site, person: People) -> None:
    """A name, a payload, an error, an item of a list: on every page, and no script of theirs runs (O-50)."""
    async with signed_in(person, embedded_site) as (admin, ana):
        [one] = await admin.add(
            event("failed", event_name=SCRIPT, payload={"nome": SCRIPT, TAG: "'\"><b>"}, last_error=f"HTTP 500: {TAG}")
        )
        [mail] = await admin.add(
            email("failed", 1, to=f'"{SCRIPT}"@example.com', subject=SCRIPT, content=TAG, error_message=f"554 {TAG}")
        )
        [_, letter] = await admin.add(letter_of(one, error=TAG), rejected_item(3, error=SCRIPT, body=TAG.encode()))
        await admin.add(position("sync", TAG, halted_reason=SCRIPT), *batch(3))
        pages = {
            "/": SCRIPT,
            "/events": SCRIPT,
            f"/events?name={SCRIPT}&q={TAG}": TAG,
            f"/events/{one}": TAG,
            f"/events/confirm?name={SCRIPT}": SCRIPT,
            "/emails": TAG,
            f"/emails/{mail}": SCRIPT,
            "/letters": TAG,
            f"/letters?reason={TAG}": "",
            f"/letters/{letter}": SCRIPT,
            "/positions": TAG,
            f"/batches?batch={BATCH[:8]}": "",
        }
        for path, said in pages.items():
            await ana.open(path)
            await expect(ana.tab.locator("main")).to_be_visible()
            if path != "/":
                await expect(ana.tab.locator("main")).to_contain_text(said)
            assert await ana.tab.locator("main img, main script, main b").count() == 0, path
        await ana.open(f"/emails/{mail}")
        await ana.tab.get_by_text("Mostrar como foi escrito").click()
        await expect(ana.tab.locator("details pre")).to_have_text(TAG)
    # that no dialog came up and no rule of the page was broken is looked at when the browser closes


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_page_fits_a_phone(embedded_site: Site, person: People, scheme: str) -> None:
    """Nothing has to be pushed sideways to be read, whatever the length of a name; pictures of all are kept."""
    async with signed_in(
        person, embedded_site, viewport=PHONE, color_scheme=scheme, has_touch=True, is_mobile=True
    ) as (admin, ana):
        first = (await a_day(admin))[0]
        paths = {name: path.format(event=first) for name, path in PAGES.items()}
        for name, path in paths.items():
            await ana.open(path)
            await expect(ana.tab.locator("h1")).to_be_visible()
            await ana.picture(name)
        long = "x" * 180
        await admin.add(
            event("failed", event_name=long, last_error=long), email("failed", 99, to=f"{long}@example.com")
        )
        beyond = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        for path in paths.values():
            await ana.open(path)
            await expect(ana.tab.locator("h1")).to_be_visible()
            assert await ana.tab.evaluate(beyond) <= 0, path


PAGES = {
    "overview": "/",
    "events": "/events",
    "event": "/events/{event}",
    "confirm": "/events/confirm",
    "emails": "/emails",
    "email": "/emails/2",
    "batches": "/batches",
    "requests": "/requests",
    "request-new": "/requests/new",
    "letters": "/letters",
    "letter": "/letters/3",
    "positions": "/positions",
}


async def test_every_page_stands_on_a_desk(embedded_site: Site, person: People) -> None:
    """Pictures of all are kept; docs/admin-page.md shows some of them."""
    async with signed_in(person, embedded_site) as (admin, ana):
        ids = await a_day(admin)
        for name, path in PAGES.items():
            await ana.open(path.format(event=ids[0]))
            await expect(ana.tab.locator("h1")).to_be_visible()
            await ana.picture(name)


async def test_pages_are_usable_without_a_mouse(embedded_site: Site, person: People) -> None:
    """From the top by the tabulator: the way to the content first, then pages; every field has a name."""
    async with signed_in(person, embedded_site) as (admin, ana):
        await a_day(admin)
        await ana.open("/events")
        await ana.tab.keyboard.press("Tab")
        await expect(ana.tab.get_by_role("link", name="Ir para o conteúdo")).to_be_focused()
        await ana.tab.keyboard.press("Enter")
        await expect(ana.tab.locator("main")).to_be_focused()
        for field in await ana.tab.locator("main input:visible, main select:visible").all():
            assert await field.evaluate("f => Boolean(f.labels?.length || f.getAttribute('aria-label'))")
