"""Events and e-mails: lists, one row, and the retry of those that failed."""

from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

import structlog
from sqlalchemy import ColumnElement
from starlette.exceptions import HTTPException
from starlette.responses import Response

from processors._retry import Retried, Wanted, retry_rows
from processors.admin import rows
from processors.admin.access import Change, Look
from processors.admin.filters import BadFilter, Filter
from processors.admin.forms import Form
from processors.admin.looking import clock, look
from processors.admin.office import Visit
from processors.admin.rows import EVENT_LIST, List, Page

BULK_LIMIT = 5_000
"""Rows that one click retries; the rest needs another one, with the new number before the eyes."""

MAX_ADDRESS = 320

log = structlog.get_logger(__name__)


# ---- looking


def listing(what: List) -> Look:
    """The list of one table."""
    return partial(_listing, what)


async def _listing(what: List, visit: Visit) -> Response:
    error, wanted = "", Filter()
    try:
        wanted = Filter.read(dict(visit.request.query_params))
    except BadFilter as wrong:
        error = f"Filtro não aplicado: {wrong}."
    async with look(visit.office.engine) as connection:
        now = await clock(connection)
        found = await rows.find(connection, what, wanted, now)
        names = await rows.event_names(connection) if what is EVENT_LIST else []
    return _list_page(visit, what, found, now, wanted=wanted, names=names, error=error, status=400 if error else 200)


async def search_address(visit: Visit, form: Form) -> Response:
    """The e-mails of one address: by a form that is sent, so that the address stands in no history and no log."""
    address = form.get("address")
    if not address or len(address) > MAX_ADDRESS or "\0" in address:
        raise HTTPException(400, "Escreva um endereço de e-mail.")
    async with look(visit.office.engine) as connection:
        now = await clock(connection)
        found = await rows.find_address(connection, address, now)
    return _list_page(visit, rows.EMAIL_LIST, found, now, wanted=Filter(), names=[], address=address)


def _list_page(visit: Visit, what: List, found: Page, now: datetime, **values: Any) -> Response:
    defaults = {"error": "", "address": ""}
    return visit.page(f"{what.path}.html", what=what, found=found, now=now, **{**defaults, **values})


def detail(what: List) -> Look:
    """One row with its history."""
    return partial(_detail, what)


async def _detail(what: List, visit: Visit) -> Response:
    async with look(visit.office.engine) as connection:
        now = await clock(connection)
        found = await rows.one(connection, what, visit.number("id"), now)
        made = await rows.repayment(connection, visit.number("id")) if what is rows.REQUEST_LIST else None
    if found is None:
        raise HTTPException(404)
    return visit.page(f"{what.path.removesuffix('s')}.html", what=what, found=found, made=made, now=now)


# ---- retrying


def retry(what: List) -> Change:
    """Those that were ticked, or the one of a detail page."""
    return partial(_retry, what)


async def _retry(what: List, visit: Visit, form: Form) -> Response:
    ids = list(dict.fromkeys(form.numbers("id")))
    if not ids:
        raise HTTPException(400, "Nenhuma linha foi marcada.")
    wanted = Wanted(what.kind, visit.user.name, ids, failed_only=True)
    return _result(visit, what, await retry_rows(visit.office.engine, wanted))


def confirm(what: List) -> Look:
    """How many would be retried if all were that meet the filter; asks."""
    return partial(_confirm, what)


async def _confirm(what: List, visit: Visit) -> Response:
    wanted = _failed(dict(visit.request.query_params))
    async with look(visit.office.engine) as connection:
        now = await clock(connection)
        number = await rows.count(connection, what, rows.meets(what, wanted))
    fields = {**wanted.fields(), "asked": now.isoformat()}
    return visit.page("confirm.html", what=what, number=number, limit=BULK_LIMIT, wanted=wanted, fields=fields)


def retry_all(what: List) -> Change:
    """All that meet the filter, but those that failed after the question: their number was not in it."""
    return partial(_retry_all, what)


async def _retry_all(what: List, visit: Visit, form: Form) -> Response:
    wanted = _failed(form.as_dict())
    try:
        asked = datetime.fromisoformat(form.get("asked"))
    except ValueError:
        raise HTTPException(400) from None
    if asked.tzinfo is None:
        raise HTTPException(400)
    before: ColumnElement[bool] = what.columns.updated_at <= asked
    conditions = [*rows.meets(what, wanted), before]
    order = Wanted(what.kind, visit.user.name, conditions=conditions, failed_only=True, limit=BULK_LIMIT)
    return _result(visit, what, await retry_rows(visit.office.engine, order))


def _failed(fields: dict[str, str]) -> Filter:
    try:
        return replace(Filter.read(fields), state="failed", before=None)
    except BadFilter as error:
        raise HTTPException(400, f"O filtro não pode ser lido: {error}.") from None


def _result(visit: Visit, what: List, retried: Retried) -> Response:
    log.info("admin.retried", table=what.path, done=len(retried.done), refused=len(retried.refused), by=visit.user.name)
    return visit.page("result.html", what=what, retried=retried)
