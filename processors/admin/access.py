"""Who may see a page and who may change something: what is checked before a page's own function is called."""

import re
from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from processors.admin.forms import Form, read_form
from processors.admin.office import Office, Visit, office_of
from processors.admin.sessions import Session
from processors.admin.users import User

Look = Callable[[Visit], Awaitable[Response]]
Change = Callable[[Visit, Form], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]

_OURS = re.compile(r"(?:/[a-z][a-z-]*(?:/[A-Za-z0-9_-]+)?)?/?")
"""Paths to which a sign-in may lead back: never another site's."""


def looks(page: Look) -> Endpoint:
    """A page for everybody who has signed in; others sign in first and then come back."""

    async def endpoint(request: Request) -> Response:
        visit = _visit(request)
        if visit is None:
            return RedirectResponse(f"/login?next={safe_next(request.url.path)}", 303)
        return _renewed(visit, await page(visit))

    return endpoint


def asks(page: Change) -> Endpoint:
    """A form that changes nothing, for everybody who has signed in: what it says must not stand in an address."""
    return _posted(page, changes=False)


def changes(page: Change) -> Endpoint:
    """A form that changes something: of this session, and by an operator. Else 403."""
    return _posted(page, changes=True)


def _posted(page: Change, *, changes: bool) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        visit = _visit(request)
        if visit is None:
            raise HTTPException(403, "Entre primeiro: a sessão terminou.")
        form = await read_form(request)
        check_token(visit.office, visit.session, form)
        if changes and not visit.user.may_change:
            raise HTTPException(403, "O seu usuário só pode consultar.")
        return _renewed(visit, await page(visit, form))

    return endpoint


def check_token(office: Office, session: Session, form: Form) -> None:
    """Raise 403 unless the form is one of this session."""
    if not office.sessions.is_token(session, form.get("token")):
        raise HTTPException(403, "Este formulário não é desta sessão. Volte, recarregue a página e tente de novo.")


def current_session(request: Request) -> Session | None:
    """The session of the cookie, signed in or not."""
    office = office_of(request)
    return office.sessions.read(request.cookies.get(office.cookie))


def user_of(office: Office, session: Session | None) -> User | None:
    """Who has signed in with this session; nobody, if their password or role is another one since."""
    user = office.users.get(session.user) if session is not None and session.user is not None else None
    return user if user is not None and session is not None and user.mark == session.mark else None


def _visit(request: Request) -> Visit | None:
    office, session = office_of(request), current_session(request)
    user = user_of(office, session)
    if session is None or user is None:
        return None
    request.state.user = user.name
    return Visit(request, office, session, user)


def _renewed(visit: Visit, response: Response) -> Response:
    sessions = visit.office.sessions
    renewed = sessions.renewed(visit.session)
    if renewed is not None and "set-cookie" not in response.headers:
        visit.office.set_cookie(response, visit.office.cookie, sessions.write(renewed))
    return response


def safe_next(path: str) -> str:
    """The path, if it is one of ours; else the first page."""
    return path if _OURS.fullmatch(path) else "/"
