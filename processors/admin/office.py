"""What all pages share: the settings, the database, who may come in, and how a page is written."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from models.base import MAX_ID
from processors._settings import Settings
from processors.admin import words
from processors.admin.lockout import Lockout
from processors.admin.sessions import Session, Sessions
from processors.admin.users import User, Users, parse_users
from streams.log import Log

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Office:
    """One per process."""

    settings: Settings
    engine: AsyncEngine
    log: Log
    users: Users
    sessions: Sessions
    lockout: Lockout
    templates: Environment = field(repr=False)
    one_password: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    """A password takes 64 MiB and a core for a moment: a crowd that guesses must not take all there is."""

    # ---- cookies

    @property
    def cookie(self) -> str:
        """Its prefix makes browsers refuse it from anybody but this very host."""
        return "__Host-afluente" if self.settings.admin_cookie_secure else "afluente"

    @property
    def device_cookie(self) -> str:
        return f"{self.cookie}-device"

    def set_cookie(self, response: Response, name: str, value: str, seconds: int | None = None) -> None:
        """Never readable by a script, never sent along from another site's form or picture."""
        response.set_cookie(
            name, value, max_age=seconds, path="/", secure=self.settings.admin_cookie_secure, httponly=True,
            samesite="lax",
        )  # fmt: skip


def open_office(
    settings: Settings,
    engine: AsyncEngine,
    log: Log,
    wall: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
) -> Office:
    """The office of these settings, in which ADMIN_SECRET_KEY and ADMIN_USERS stand."""
    key, users = settings.admin_secret_key, settings.admin_users
    if key is None or users is None:
        raise ValueError("the settings lack ADMIN_SECRET_KEY or ADMIN_USERS")
    return Office(
        settings,
        engine,
        log,
        Users(parse_users(users.get_secret_value())),
        Sessions(key.get_secret_value(), settings.admin_idle_seconds, settings.admin_session_seconds, wall),
        Lockout(monotonic),
        _templates(),
    )


def office_of(request: Request) -> Office:
    """The office in which a request has come in."""
    office: Office = request.app.state.office
    return office


@dataclass(frozen=True, slots=True)
class Visit:
    """One request of somebody who has signed in."""

    request: Request
    office: Office
    session: Session
    user: User

    def page(self, template: str, status: int = 200, **values: Any) -> Response:
        """A page of ours with the frame around it."""
        return page(
            self.request, template, status, visit=self, token=self.office.sessions.token(self.session), **values
        )

    def number(self, name: str) -> int:
        """A number of a row in the path. Raises 404 for one that no row can have."""
        value: int = self.request.path_params[name]
        if value > MAX_ID:
            raise HTTPException(404)
        return value


def page(request: Request, template: str, status: int = 200, **values: Any) -> Response:
    """A page; for somebody who has not signed in it has no `visit`."""
    text = (
        office_of(request).templates.get_template(template).render({"visit": None, "path": request.url.path, **values})
    )
    return HTMLResponse(text, status)


# ---- templates


def _templates() -> Environment:
    """Everything is escaped, and a name that nobody has given is a mistake and not an empty string."""
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "when": words.when,
        "ago": words.ago,
        "number": words.number,
        "money": words.money,
        "pretty": words.pretty,
    }
    environment.globals |= {
        "STATES": words.STATES,
        "REFUSALS": words.REFUSALS,
        "LETTER_STATES": words.LETTER_STATES,
        "REASONS": words.REASONS,
        "PAYMENT_STATES": words.PAYMENT_STATES,
    }
    return environment
