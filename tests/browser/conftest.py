"""A real browser; a fresh context, as of another person's machine, for each. A missing one fails."""

import os
import re
import shutil
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Page, async_playwright, expect

from tests.conftest import ROOT, Services
from tests.support.page import PASSWORD, AdminPage
from tests.support.receiver import Receiver
from tests.support.sites import Site, embedded_site, migrated, services_site, site

__all__ = ["embedded_site", "migrated", "services_site", "site"]

ARTEFACTS = Path(os.environ.get("AFLUENTE_ARTEFACTS", ROOT / "build/screenshots"))
DESKTOP = {"width": 1200, "height": 780}
PHONE = {"width": 390, "height": 844}

expect.set_options(timeout=30_000)  # the machine may be busy with something else


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder on one loop, which is the browser's."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
            item.add_marker(pytest.mark.timeout(180))


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of Debian's Chromium, installed when it is not there."""
    Services().do("browser")
    found = shutil.which("chromium")
    if found is None:
        pytest.fail("there is no chromium in PATH, and scripts/services browser did not bring it", pytrace=False)
    return found


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def browser(chromium: str) -> AsyncIterator[Browser]:
    """One for each file of tests, so that none runs beside other folders' tests. Root cannot have its sandbox."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-dev-shm-usage"],
        )
        yield browser
        await browser.close()


class Person:
    """Somebody before a browser of their own, and what went wrong in it."""

    def __init__(self, context: BrowserContext, tab: Page, admin: AdminPage, name: str) -> None:
        self.context, self.tab, self._admin, self._name = context, tab, admin, name
        self.wrong: list[str] = []
        """Scripts that ran and should not have, rules of the page that something broke, files that were not there."""
        tab.on("dialog", self._dialog)
        tab.on("pageerror", lambda error: self.wrong.append(f"script: {error}"))
        tab.on("console", self._console)

    async def _dialog(self, dialog: Any) -> None:
        self.wrong.append(f"dialog: {dialog.message}")
        await dialog.dismiss()

    def _console(self, message: ConsoleMessage) -> None:
        # told of as well: a page that answers 4xx on purpose, an icon asked for when the site is gone with its test
        quiet = ("the server responded with a status of", "net::ERR_CONNECTION_REFUSED")
        if message.type == "error" and not any(words in message.text for words in quiet):
            self.wrong.append(f"console: {message.text}")

    async def open(self, path: str) -> None:
        """Go to a page of the site."""
        await self.tab.goto(f"{self._admin.url}{path}")

    async def sign_in(self, user: str = "ana", password: str = PASSWORD) -> None:
        """Through the form."""
        await self.open("/login")
        await self.tab.get_by_label("Usuário").fill(user)
        await self.tab.get_by_label("Senha").fill(password)
        await self.tab.get_by_role("button", name="Entrar").click()

    async def picture(self, name: str) -> None:
        """Keep how it looks, among the artefacts of this run."""
        await self.tab.screenshot(path=ARTEFACTS / f"{self._name}-{name}.png", animations="disabled")


class People(Protocol):
    """Makes somebody before a browser."""

    def __call__(self, admin: AdminPage, **options: Any) -> Awaitable[Person]: ...


@pytest_asyncio.fixture(loop_scope="session")
async def person(browser: Browser, request: pytest.FixtureRequest) -> AsyncIterator[People]:
    """Somebody with a fresh browser; how it looked at the end is kept, and nothing may have gone wrong in it."""
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    everybody: list[Person] = []

    async def appear(admin: AdminPage, **options: Any) -> Person:
        context = await browser.new_context(**{"viewport": DESKTOP, "locale": "pt-BR", **options})
        everybody.append(Person(context, await context.new_page(), admin, name))
        return everybody[-1]

    yield appear
    for number, one in enumerate(everybody):
        if not one.tab.is_closed():
            await one.picture(f"end-{number}" if number else "end")
        await one.context.close()
    assert not [what for one in everybody for what in one.wrong]


@pytest_asyncio.fixture(loop_scope="session")
async def receiver() -> AsyncIterator[Receiver]:
    """The new checkout, answering 201 until a test says otherwise."""
    async with Receiver() as receiver:
        yield receiver


@asynccontextmanager
async def signed_in(
    person: People, site: Site, user: str = "ana", **options: Any
) -> AsyncIterator[tuple[AdminPage, Person]]:
    """The page on a site, and somebody who has signed in there."""
    async with AdminPage(site) as admin:
        one = await person(admin, **options)
        await one.sign_in(user)
        await one.tab.wait_for_url(f"{admin.url}/")
        yield admin, one
