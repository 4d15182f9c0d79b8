"""A browser's part, without a browser: cookies kept, forms sent with their token."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tests.support.page import PASSWORD, AdminPage

TOKEN = re.compile(r'name="token" value="([0-9a-f]{64})"')


class Client:
    """One session on the page; redirects are followed only when asked for."""

    def __init__(self, admin: AdminPage, session: aiohttp.ClientSession) -> None:
        self.admin, self.session, self.token = admin, session, ""

    async def get(self, path: str, **options: Any) -> tuple[aiohttp.ClientResponse, str]:
        """The answer and its text."""
        async with self.session.get(f"{self.admin.url}{path}", allow_redirects=False, **options) as answer:
            return answer, await answer.text()

    async def post(self, path: str, **fields: Any) -> tuple[aiohttp.ClientResponse, str]:
        """A form of this session, as a page of ours sends it."""
        data = aiohttp.FormData({"token": self.token})
        for name, value in fields.items():
            for one in value if isinstance(value, list) else [value]:
                data.add_field(name, str(one))
        return await self.send(path, data=data, headers={"Origin": self.admin.url})

    async def send(self, path: str, method: str = "POST", **options: Any) -> tuple[aiohttp.ClientResponse, str]:
        """Whatever somebody may send."""
        url = f"{self.admin.url}{path}"
        async with self.session.request(method, url, allow_redirects=False, **options) as answer:
            return answer, await answer.text()

    async def sign_in(self, user: str = "ana", password: str = PASSWORD) -> None:
        """Through the form; its session's token is used from now on."""
        _, page = await self.get("/login")
        self.token = TOKEN.findall(page)[0]
        answer, _ = await self.post("/login", user=user, password=password, next="/")
        assert answer.status == 303, answer.status
        _, page = await self.get("/")
        self.token = TOKEN.findall(page)[0]


@asynccontextmanager
async def client(admin: AdminPage, user: str | None = "ana") -> AsyncIterator[Client]:
    """Somebody who has signed in, or not."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        one = Client(admin, session)
        if user is not None:
            await one.sign_in(user)
        yield one
