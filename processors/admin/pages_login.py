"""Signing in and out."""

import asyncio
import math

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from processors.admin.access import check_token, current_session, safe_next, user_of
from processors.admin.forms import Form, read_form
from processors.admin.lockout import keys_of
from processors.admin.office import Office, Visit, office_of, page
from processors.admin.sessions import DEVICE_SECONDS, Session
from processors.admin.users import User

log = structlog.get_logger(__name__)


async def ask(request: Request) -> Response:
    """The form. Whoever has signed in already is led on."""
    office, session = office_of(request), current_session(request)
    target = safe_next(request.query_params.get("next", "/"))
    if user_of(office, session) is not None:
        return RedirectResponse(target, 303)
    return _form(request, office, session, target)


async def sign_in(request: Request) -> Response:
    """The form, sent. Every wrong password counts; who has to wait is told how long, whoever they say they are."""
    office, session, form = office_of(request), current_session(request), await read_form(request)
    target = safe_next(form.get("next"))
    if session is None:
        return _form(request, office, None, target, 403, "A página ficou aberta por muito tempo. Tente de novo.")
    check_token(office, session, form)
    name = form.get("user").lower()
    keys = keys_of(
        name, _address(request), office.sessions.known_device(request.cookies.get(office.device_cookie), name)
    )
    wait = office.lockout.begin(keys)
    if wait > 0:
        log.warning("admin.sign_in_locked", counter=keys[0][0])
        return _locked(request, office, session, target, wait)
    async with office.one_password:
        user = await asyncio.to_thread(office.users.check, name, form.exact("password"))
    if user is None:
        log.warning("admin.sign_in_refused", counter=keys[0][0])
        return _form(request, office, session, target, 401, "Usuário ou senha incorretos.")
    office.lockout.succeeded(keys)
    return _signed_in(office, session, user, target)


async def sign_out(visit: Visit, form: Form) -> Response:  # noqa: ARG001 - its token was all of it
    """End this session, also for whoever may have copied its cookie."""
    visit.office.sessions.end(visit.session)
    response = RedirectResponse("/login", 303)
    response.delete_cookie(
        visit.office.cookie, secure=visit.office.settings.admin_cookie_secure, httponly=True, samesite="lax"
    )
    return response


def _signed_in(office: Office, former: Session, user: User, target: str) -> Response:
    """A session with a new id, so that nobody can have put the old one into this browser."""
    log.info("admin.signed_in", by=user.name)
    office.sessions.end(former)
    response = RedirectResponse(target, 303)
    office.set_cookie(response, office.cookie, office.sessions.write(office.sessions.begin(user.name, user.mark)))
    office.set_cookie(response, office.device_cookie, office.sessions.device(user.name), DEVICE_SECONDS)
    return response


def _locked(request: Request, office: Office, session: Session, target: str, wait: float) -> Response:
    minutes = math.ceil(wait / 60)
    text = f"Muitas senhas erradas. Espere {minutes} minuto{'s' if minutes > 1 else ''} e tente de novo."
    response = _form(request, office, session, target, 429, text)
    response.headers["Retry-After"] = str(math.ceil(wait))
    return response


def _form(
    request: Request, office: Office, session: Session | None, target: str, status: int = 200, error: str = ""
) -> Response:
    """With a session of its own where there is none yet: its token is what the form carries."""
    mine = session if session is not None and session.user is None else office.sessions.begin()
    response = page(
        request, "login.html", status, token=office.sessions.token(mine), target=target, error=error,
    )  # fmt: skip
    if mine is not session:
        office.set_cookie(response, office.cookie, office.sessions.write(mine))
    return response


def _address(request: Request) -> str:
    if request.client is None:
        raise HTTPException(400)
    return request.client.host
