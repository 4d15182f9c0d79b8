"""The page as an ASGI application: its addresses, what stands before them, what is said when it fails."""

from http import HTTPStatus

import structlog
from sqlalchemy.exc import DBAPIError
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

from processors.admin import pages_login, pages_repayments, pages_rows, pages_state
from processors.admin.access import Endpoint, asks, changes, looks
from processors.admin.guard import AccessLog, SameOrigin, SecurityHeaders
from processors.admin.looking import TooSlow
from processors.admin.office import HERE, Office, page
from processors.admin.rows import LISTS, List
from streams.database import is_away
from streams.telemetry import capture_crash

log = structlog.get_logger(__name__)


def build(office: Office) -> Starlette:
    """The application of an office."""
    app = Starlette(
        routes=_routes(),
        middleware=[
            Middleware(AccessLog),
            Middleware(SecurityHeaders),
            Middleware(TrustedHostMiddleware, allowed_hosts=office.settings.admin_allowed_hosts, www_redirect=False),
            Middleware(SameOrigin),
        ],
        exception_handlers={HTTPException: _refused},
    )
    app.state.office = office
    return app


def _routes() -> list[BaseRoute]:
    """Whatever changes something takes POST only."""
    return [
        _get("/", looks(pages_state.overview)),
        _get("/batches", looks(pages_state.batches)),
        _get("/letters", looks(pages_state.letters)),
        _get("/letters/{id:int}", looks(pages_state.letter)),
        _get("/positions", looks(pages_state.positions)),
        _get("/requests/new", looks(pages_repayments.ask)),
        _post("/requests/new", changes(pages_repayments.send)),
        _post("/emails/search", asks(pages_rows.search_address)),
        *(route for what in LISTS.values() for route in _of_rows(what)),
        _get("/login", pages_login.ask),
        _post("/login", pages_login.sign_in),
        _post("/logout", asks(pages_login.sign_out)),
        Mount("/static", _Files(directory=HERE / "static")),
    ]


def _of_rows(what: List) -> list[BaseRoute]:
    return [
        _get(f"/{what.path}", looks(pages_rows.listing(what))),
        _get(f"/{what.path}/confirm", looks(pages_rows.confirm(what))),
        _post(f"/{what.path}/retry", changes(pages_rows.retry(what))),
        _post(f"/{what.path}/retry-all", changes(pages_rows.retry_all(what))),
        _get(f"/{what.path}/{{id:int}}", looks(pages_rows.detail(what))),
    ]


def _get(path: str, endpoint: Endpoint) -> Route:
    return Route(path, _named(path, endpoint), methods=["GET"])


def _post(path: str, endpoint: Endpoint) -> Route:
    return Route(path, _named(path, endpoint), methods=["POST"])


def _named(path: str, endpoint: Endpoint) -> Endpoint:
    """Tell the access log which page it was, without the numbers in its address; and answer whatever goes wrong there.

    Not by Starlette's handler of all errors, which stands outside of the guard: its answers would lack the headers.
    """

    async def named(request: Request) -> Response:
        request.state.route = path
        if any("\0" in value for value in request.query_params.values()):  # no text of the database holds one
            raise HTTPException(400)
        try:
            return await endpoint(request)
        except HTTPException:
            raise
        except Exception as error:
            return _failed(request, error)

    return named


class _Files(StaticFiles):
    """Our style sheet, script and icon. A browser may keep them, and asks whether they are still the same."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def kept(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Cache-Control"] = "no-cache"
            await send(message)

        scope.setdefault("state", {})["route"] = "static"
        await super().__call__(scope, receive, kept)


# ---- when something goes wrong

_SAYS = {
    400: "Este pedido não pode ser lido.",
    404: "Isto não existe, ou não existe mais.",
    405: "Este endereço não aceita este método. Nada foi alterado.",
    413: "O formulário enviado é grande demais.",
    415: "Isto não é um formulário desta página.",
}


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - Starlette's registry has it so
    said = error.detail if error.detail != HTTPStatus(error.status_code).phrase else ""
    response = _error(request, error.status_code, said or _SAYS.get(error.status_code, "O pedido foi recusado."))
    response.headers.update(error.headers or {})
    return response


_TOO_SLOW = "A busca demorou demais e foi interrompida. Estreite o filtro: um estado, um evento, um período menor."


def _failed(request: Request, error: Exception) -> Response:
    """Nothing of the error is shown: it may hold a row."""
    if isinstance(error, TooSlow):
        return _error(request, 503, _TOO_SLOW)
    if isinstance(error, DBAPIError | OSError | TimeoutError) and is_away(error):
        return _error(request, 503, "O banco de dados não responde. Tente de novo em instantes.")
    log.error("admin.failed", error=type(error).__name__, exc_info=error)
    capture_crash(error)
    return _error(request, 500, "Algo falhou nesta página. O erro foi registrado.")


def _error(request: Request, status: int, text: str) -> Response:
    return page(request, "error.html", status, text=text, code=status)
