"""What holds for every request, before any page is asked: headers, where a change may come from, the access log."""

import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = structlog.get_logger(__name__)

SAFE = ("GET", "HEAD")

CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "style-src 'self'",
        "script-src 'self'",
        "img-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # not no-referrer: with it a browser says "Origin: null" of our own forms
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}


class SecurityHeaders:
    """On every answer, errors included; a page may say something else about caching only."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, with_headers)


class SameOrigin:
    """Refuses with 403 whatever may change something and was not sent by a page of ours."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in SAFE and not is_ours(Headers(scope=scope)):
            await PlainTextResponse("403: este pedido não veio desta página\n", 403)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def is_ours(headers: Headers) -> bool:
    """Whether the browser says that one of our own pages has sent this. Every browser of today says it."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is None and origin is None:
        return False
    if site is not None and site != "same-origin":
        return False
    # a proxy may have taken TLS off, so the scheme here says nothing
    return origin is None or urlsplit(origin).netloc.lower() == headers.get("host", "").lower()


class AccessLog:
    """One line for each request: the route and never the path, no query, no address of anybody."""

    def __init__(self, app: ASGIApp, quiet: Sequence[str] = ("static",)) -> None:
        self._app, self._quiet = app, quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = time.perf_counter(), 500

        async def noting(message: Message) -> None:
            nonlocal status
            status = message["status"] if message["type"] == "http.response.start" else status
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            state = scope.get("state", {})
            route = state.get("route", "-")
            if route not in self._quiet:
                milliseconds = round((time.perf_counter() - began) * 1000)
                user = state.get("user")
                log.info("admin.request", method=scope["method"], route=route, status=status, ms=milliseconds, by=user)
