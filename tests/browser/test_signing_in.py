"""Who comes in and who does not; and that only a click on a page of ours changes anything."""

from collections.abc import Sequence

import pytest
from playwright.async_api import expect

from tests.browser.conftest import People, Person, signed_in
from tests.support.page import AdminPage, event
from tests.support.receiver import Receiver, Reply
from tests.support.sites import Site


async def test_stranger_is_led_to_the_form_and_from_there_to_the_page_that_was_asked_for(
    embedded_site: Site, person: People
) -> None:
    """Nothing of a row is shown before; the name on the page is that of who signed in."""
    async with AdminPage(embedded_site) as admin:
        [one] = await admin.add(event("failed"))
        ana = await person(admin)
        await ana.open(f"/events/{one}")
        await expect(ana.tab.get_by_role("heading", name="Entrar")).to_be_visible()
        await expect(ana.tab.locator("body")).not_to_contain_text("new_checkout")
        await ana.tab.get_by_label("Usuário").fill("ana")
        await ana.tab.get_by_label("Senha").fill("uma senha inventada")
        await ana.tab.get_by_role("button", name="Entrar").click()
        await expect(ana.tab.get_by_role("heading", name=f"Evento {one}")).to_be_visible()
        await expect(ana.tab.locator(".who")).to_contain_text("ana")
        cookies = {c["name"]: c for c in await ana.context.cookies()}
        assert cookies["afluente"]["httpOnly"]
        assert cookies["afluente"]["sameSite"] == "Lax"


async def test_wrong_password_and_unknown_name_are_told_alike(embedded_site: Site, person: People) -> None:
    """The page does not say which names there are."""
    async with AdminPage(embedded_site) as admin:
        ana = await person(admin)
        for user in ("ana", "nobody"):
            await ana.sign_in(user, "not the password")
            await expect(ana.tab.get_by_role("alert")).to_have_text("Usuário ou senha incorretos.")
            await expect(ana.tab.get_by_label("Senha")).to_have_value("")


async def test_guessing_is_locked_out_and_the_wait_ends(embedded_site: Site, person: People) -> None:
    """Five guesses, then not even the right password is looked at; after the wait it is."""
    async with AdminPage(embedded_site) as admin:
        thief = await person(admin)
        for _ in range(5):
            await thief.sign_in("ana", "a guess of many")
            await expect(thief.tab.get_by_role("alert")).to_contain_text("incorretos")
        await thief.sign_in()
        await expect(thief.tab.get_by_role("alert")).to_contain_text("Espere 1 minuto")
        admin.clock.advance(31)
        await thief.sign_in()
        await expect(thief.tab.get_by_role("heading", name="Visão geral")).to_be_visible()


async def test_person_is_not_locked_out_of_their_own_browser_by_a_stranger(embedded_site: Site, person: People) -> None:
    """A browser in which ana has signed in before has a counter of its own."""
    async with signed_in(person, embedded_site) as (admin, ana):
        await ana.tab.get_by_role("button", name="Sair").click()
        await expect(ana.tab.get_by_role("heading", name="Entrar")).to_be_visible()
        thief = await person(admin)
        for _ in range(6):
            await thief.sign_in("ana", "a guess of many")
            await expect(thief.tab.get_by_role("alert")).to_be_visible()
        await expect(thief.tab.get_by_role("alert")).to_contain_text("Espere")
        await ana.sign_in()
        await expect(ana.tab.get_by_role("heading", name="Visão geral")).to_be_visible()


async def test_session_ends_by_sign_out_and_by_itself(embedded_site: Site, person: People) -> None:
    """Also for whoever kept a copy of the cookie."""
    async with signed_in(person, embedded_site) as (admin, ana):
        [copy] = [c["value"] for c in await ana.context.cookies() if c["name"] == "afluente"]
        await ana.tab.get_by_role("button", name="Sair").click()
        await expect(ana.tab.get_by_role("heading", name="Entrar")).to_be_visible()
        await ana.context.add_cookies([{"name": "afluente", "value": copy, "url": admin.url}])
        await ana.open("/events")
        await expect(ana.tab.get_by_role("heading", name="Entrar")).to_be_visible()
        await ana.sign_in()
        await expect(ana.tab.get_by_role("heading", name="Visão geral")).to_be_visible()
        admin.clock.advance(1801)
        await ana.open("/events")
        await expect(ana.tab.get_by_role("heading", name="Entrar")).to_be_visible()


async def test_form_with_a_wrong_token_is_refused(embedded_site: Site, person: People) -> None:
    """A token of another session is one as well: 403, and the row is as it was."""
    async with signed_in(person, embedded_site) as (admin, ana):
        [one] = await admin.add(event("failed"))
        bia = await person(admin)
        await bia.sign_in("bia")
        await bia.tab.wait_for_url(f"{admin.url}/")
        theirs = await bia.tab.locator("input[name=token]").first.input_value()
        for token in ("", "0" * 64, theirs):
            await ana.open(f"/events/{one}")
            await ana.tab.locator("main input[name=token]").evaluate("(field, token) => { field.value = token }", token)
            async with ana.tab.expect_navigation() as navigation:
                await ana.tab.get_by_role("button", name="Repetir").click()
            answer = await navigation.value
            assert answer is not None
            assert answer.status == 403
            await expect(ana.tab.get_by_role("alert")).to_contain_text("não é desta sessão")
        assert await admin.state("outbox_events", one) == ("failed", 3)


async def test_viewer_who_forges_the_form_gets_403(services_site: Site, person: People) -> None:
    """A good session and a good token of somebody who may only look (O-42)."""
    async with signed_in(person, services_site, "bia") as (admin, bia):
        [one] = await admin.add(event("failed"))
        token = await bia.tab.locator("input[name=token]").first.input_value()
        for path in ("/events/retry", "/events/retry-all", "/requests/new"):
            assert await posted(bia, path, token, [one]) == 403
        assert await admin.state("outbox_events", one) == ("failed", 3)
        assert await admin.sql("SELECT id FROM audits WHERE event = 'updated'") == []


async def posted(one: Person, path: str, token: str, ids: Sequence[int]) -> int:
    """The status of a form that a script of this very page sends."""
    # the page's own rules forbid scripts to connect, so a form is made and its answer waited for
    async with one.tab.expect_navigation() as navigation:
        await one.tab.evaluate(
            """([path, token, ids]) => {
                const form = document.createElement("form");
                form.method = "post";
                form.action = path;
                for (const [name, value] of [["token", token], ...ids.map((id) => ["id", id])]) {
                    const field = document.createElement("input");
                    field.name = name;
                    field.value = value;
                    form.append(field);
                }
                document.body.append(form);
                form.submit();
            }""",
            [path, token, list(ids)],
        )
    answer = await navigation.value
    assert answer is not None
    return answer.status


# ---- pages of others


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_page_of_somebody_else_changes_nothing(
    embedded_site: Site, person: People, receiver: Receiver, host: str
) -> None:
    """Pictures, prefetches, frames, addresses that are opened, a form that sends itself: by a browser that is signed
    in, from a neighbour (another port of this host) and from another site (O-42)."""
    async with signed_in(person, embedded_site) as (admin, ana):
        ids = await admin.add(*(event("failed") for _ in range(3)))
        query = "&".join(f"id={row_id}" for row_id in ids)
        target = f"{admin.url}/events/retry?{query}"
        pages = {
            "/pictures": f'<img src="{target}"><link rel="prefetch" href="{target}"><iframe src="{target}"></iframe>'
            f'<img src="{admin.url}/events/retry-all"><a href="{target}">x</a>',
            "/form": f'<form method="post" action="{admin.url}/events/retry">'
            + "".join(f'<input name="id" value="{row_id}">' for row_id in ids)
            + "</form><script>document.forms[0].submit()</script>",
        }
        receiver.script = lambda request: Reply(200, pages[request.path].encode(), {"Content-Type": "text/html"})
        evil = receiver.url.replace("127.0.0.1", host)
        await ana.tab.goto(f"{evil}/pictures", wait_until="load")
        for method in ("GET", "HEAD", "OPTIONS", "PUT", "DELETE"):
            answer = await ana.context.request.fetch(target, method=method)
            assert answer.status in (403, 405)
        await ana.tab.goto(target)
        await expect(ana.tab.get_by_role("alert")).to_contain_text("Nada foi alterado")
        await ana.tab.goto(f"{evil}/form")
        await expect(ana.tab.locator("body")).to_have_text("403: este pedido não veio desta página")
        for row_id in ids:
            assert await admin.state("outbox_events", row_id) == ("failed", 3)
        assert await admin.sql("SELECT id FROM audits WHERE event = 'updated'") == []
        await ana.open("/events")
        await expect(ana.tab.locator("tbody tr")).to_have_count(3)  # and ana is still signed in
        ana.wrong.clear()  # the browser has told of what it blocked on those pages
