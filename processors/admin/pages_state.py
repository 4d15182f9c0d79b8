"""How things stand: the first page, batches, dead letters, positions. Nothing here changes anything."""

import re
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from processors.admin import state
from processors.admin.looking import TooSlow, clock, look
from processors.admin.office import Visit
from processors.admin.words import several

_HEX = re.compile(r"[0-9a-f]{0,64}")


@dataclass(frozen=True, slots=True)
class Attention:
    """Something that a person should look at, and where."""

    what: str
    link: str
    grave: bool = False


async def overview(visit: Visit) -> Response:
    """What needs a person, then the counts."""
    async with look(visit.office.engine) as connection:
        now = await clock(connection)
        counts = await state.all_counts(connection)
        positions = await state.positions(connection, now)
    try:
        letters: Any = await state.open_letters(visit.office.engine)
    except TooSlow:
        letters = None
    found = [*_of_rows(counts), *_of_positions(positions)]
    if letters:
        open_now = sum(row["letters"] for row in letters)
        found.append(Attention(several(open_now, "mensagem morta", "mensagens mortas") + " em aberto", "/letters"))
    return visit.page("overview.html", now=now, counts=counts, positions=positions, letters=letters, attention=found)


_NAMES = {
    "events": ("evento", "eventos"),
    "emails": ("e-mail", "e-mails"),
    "requests": ("pedido de reparcelamento", "pedidos de reparcelamento"),
}


def _of_rows(counts: list[state.Counts]) -> list[Attention]:
    found = []
    for one in counts:
        path, names = one.what.path, _NAMES[one.what.path]
        if failed := one.states["failed"]:
            found.append(
                Attention(f"{several(failed, *names)} com tentativas esgotadas", f"/{path}?state=failed", True)
            )
        if held := one.states["held"]:
            found.append(Attention(f"{several(held, *names)} à espera de decisão", f"/{path}?state=held", True))
    return found


def _of_positions(positions: list[state.Position]) -> list[Attention]:
    return [
        Attention(f"{p.row.processor}, partição {p.row.partition} de {p.row.stream}: {p.trouble}", "/positions",
                  bool(p.row.halted_reason))
        for p in positions
        if p.trouble
    ]  # fmt: skip


async def positions(visit: Visit) -> Response:
    """How far each processor is."""
    async with look(visit.office.engine) as connection:
        now = await clock(connection)
        found = await state.positions(connection, now)
    return visit.page("positions.html", now=now, positions=found)


async def batches(visit: Visit) -> Response:
    """The import lists, and what became of each."""
    query = visit.request.query_params
    prefix, after = query.get("batch", "").strip().lower(), query.get("after")
    if not _HEX.fullmatch(prefix):
        raise HTTPException(400, "O número de um lote tem só dígitos hexadecimais.")
    async with look(visit.office.engine) as connection:
        now = await clock(connection)
        found = await state.batches(connection, prefix, after)
    return visit.page("batches.html", now=now, found=found, prefix=prefix)


async def letters(visit: Visit) -> Response:
    """What was given up, the open ones first of all."""
    query = visit.request.query_params
    before = query.get("before", "")
    every, reason = query.get("every") == "1", query.get("reason", "") or None
    found = await state.letters(
        visit.office.engine, open_only=not every, reason=reason,
        before=int(before) if before.isascii() and before.isdigit() and len(before) < 19 else None,
    )  # fmt: skip
    return visit.page("letters.html", found=found, every=every, reason=reason, groups=await _groups(visit))


async def _groups(visit: Visit) -> Any:
    try:
        return await state.open_letters(visit.office.engine)
    except TooSlow:
        return []


async def letter(visit: Visit) -> Response:
    """One, with the bytes that came."""
    found = await state.letter(visit.office.engine, visit.number("id"))
    if found is None:
        raise HTTPException(404)
    row, body = found
    return visit.page("letter.html", row=row, body=body)
