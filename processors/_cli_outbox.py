"""`afluente outbox`: events that failed, tried again."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated

import typer
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlmodel.ext.asyncio.session import AsyncSession

from models.outbox import NotRetried, OutboxEvent
from models.times import utc_now
from processors._commands import with_database
from processors._console import err, fail, named, out
from streams.exit_codes import ExitCode

CHUNK = 500
"""Events of one transaction."""

app = typer.Typer(help="Outgoing events: try those again that failed.", no_args_is_help=True)


@app.callback()
def outbox() -> None:
    """Keep `retry` a word of its own, also while it is the only one."""


@dataclass(slots=True)
class Retried:
    """How many are pending again, and why the others are not."""

    done: int = 0
    refused: list[str] = field(default_factory=list)


@app.command()
@named
def retry(
    ids: Annotated[list[int] | None, typer.Argument(metavar="[ID]...", help="these events")] = None,
    event: Annotated[str | None, typer.Option(help="all failed ones of this name")] = None,
    error: Annotated[str | None, typer.Option(help="all failed ones with this text in their last error")] = None,
    everything: Annotated[bool, typer.Option("--all", help="all failed ones")] = False,
) -> None:
    """Let events be tried again from the first attempt on; what is sent, held or in flight stays as it is."""
    by_filter = event is not None or error is not None
    if [bool(ids), by_filter, everything].count(True) != 1:
        raise typer.BadParameter("say which: ids, or --event and --error, or --all")
    done = with_database(lambda engine: retry_events(engine, ids or [], event, error))
    for sentence in done.refused:
        err.print(sentence, markup=False)
    out.print(f"{done.done:,} event{'' if done.done == 1 else 's'} retried")
    if ids and done.refused:
        raise fail(ExitCode.FAILED, f"{len(done.refused)} not retried")


async def retry_events(engine: AsyncEngine, ids: list[int], event: str | None, error: str | None) -> Retried:
    """Those with these ids; without ids all failed ones, of this name and with this text in their last error."""
    done, after = Retried(), 0
    while (last := await _chunk(engine, ids, event, error, after, done)) is not None:
        after = last
    return done


async def _chunk(
    engine: AsyncEngine, ids: list[int], event: str | None, error: str | None, after: int, done: Retried
) -> int | None:
    """Retry the next ones by id in one transaction; the last id, None when there were none."""
    row = OutboxEvent.__table__.c  # type: ignore[attr-defined]
    wanted = select(OutboxEvent).where(row.id > after).order_by(row.id).limit(CHUNK).with_for_update()
    wanted = wanted.where(row.id.in_(ids)) if ids else wanted.where(row.status == "failed")
    if event is not None:
        wanted = wanted.where(row.event_name == event)
    if error is not None:
        wanted = wanted.where(row.last_error.contains(error, autoescape=True))
    async with AsyncSession(engine) as session, session.begin():
        now: datetime = (await session.scalars(select(utc_now()))).one()
        found = (await session.scalars(wanted)).all()
        for one in found:
            try:
                one.retry(now)
                one.updated_at = now
                done.done += 1
            except NotRetried as why:
                done.refused.append(str(why))
        if ids and not after:
            done.refused += [f"there is no event {number}" for number in await _missing(session, ids)]
        return found[-1].id if found else None


async def _missing(session: AsyncSession, ids: list[int]) -> list[int]:
    row = OutboxEvent.__table__.c  # type: ignore[attr-defined]
    there = set((await session.scalars(select(row.id).where(row.id.in_(ids)))).all())
    return [number for number in ids if number not in there]
