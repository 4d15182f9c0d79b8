"""`afluente pause`, `resume` and `replay`: where a processor reads, and whether."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

import typer
from rich.table import Table
from sqlalchemy.ext.asyncio import AsyncEngine

from processors import _compose, _replay
from processors._commands import By, reading_processor, with_database, with_database_and_log
from processors._console import err, fail, named, out
from processors._replay import Move, NoSuchPlace, Outlook, Place
from processors._settings import Settings
from streams.exit_codes import ExitCode
from streams.log import Log

Name = Annotated[str, typer.Argument(help="its name")]


@named
def pause(
    processor: Name,
    reason: Annotated[str, typer.Option(help="why, for those who ask `status`")] = "",
    *,
    by: By,
) -> None:
    """Let a processor take nothing more until `resume`; it notices within seconds and finishes what it has."""
    _set_paused(processor, True, reason or None, by)


@named
def resume(processor: Name, *, by: By) -> None:
    """Let a paused processor go on, exactly where it stopped."""
    _set_paused(processor, False, None, by)


def _set_paused(processor: str, paused: bool, reason: str | None, by: str) -> None:
    name = reading_processor(processor)
    count = with_database(lambda engine: _replay.set_paused(engine, name, paused, reason, by))
    if not count:
        raise fail(ExitCode.FAILED, f"{name} has never run here: there is no position to change")
    out.print(f"{name} {'paused' if paused else 'goes on'} in {count} partition{'s' if count > 1 else ''}")


@named
def replay(  # noqa: PLR0913 - each is an option that people type
    processor: Name,
    *,
    partition: Annotated[int | None, typer.Option(help="only this one, counted from 0; default: all")] = None,
    from_offset: Annotated[int | None, typer.Option(min=0, help="read on at this offset")] = None,
    from_timestamp: Annotated[
        str | None, typer.Option(metavar="TIME", help="... at the first record since, as 2026-12-01T08:30-03:00")
    ] = None,
    first: Annotated[bool, typer.Option("--first", help="... at the first record that is still there")] = False,
    next_: Annotated[bool, typer.Option("--next", help="... at the end: what nobody has read is never read")] = False,
    clamp: Annotated[bool, typer.Option("--clamp", help="take the nearest record that is there")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would follow")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask, even if records would never be read")] = False,
    by: By,
) -> None:
    """Let a processor read on elsewhere; it notices within seconds. Nobody who has a row is mailed again."""
    name = reading_processor(processor)
    place = _place(from_offset, from_timestamp, first, next_, clamp)

    async def look(settings: Settings, engine: AsyncEngine, log: Log) -> tuple[list[Move], Outlook | None]:
        entry = _compose.PROCESSORS[name]
        stream = entry.reads(settings) if entry.reads is not None else ""
        moves = await _replay.find(engine, log, name, stream, place, partition)
        if dry_run and entry.points_at is not None:
            return moves, await _replay.forecast_rows(engine, log, moves, entry.points_at)
        if not dry_run or entry.new_keys is None:
            return moves, None
        return moves, await _replay.forecast(engine, log, moves, entry.new_keys)

    try:
        moves, outlook = with_database_and_log("afluente replay", look)
    except NoSuchPlace as error:
        raise fail(ExitCode.USAGE, str(error)) from None
    out.print(_table(name, moves))
    if dry_run:
        _say_outlook(name, moves, outlook)
        return
    _ask(moves, yes)
    with_database(lambda engine: _replay.replay(engine, name, moves, by))
    out.print(
        f"{name} reads on there within seconds" + (", when it is resumed" if any(m.paused for m in moves) else "")
    )


def _place(offset: int | None, timestamp: str | None, first: bool, next_: bool, clamp: bool) -> Place:
    chosen = [offset is not None, timestamp is not None, first, next_]
    if sum(chosen) != 1:
        raise typer.BadParameter("say one of --from-offset, --from-timestamp, --first and --next")
    return Place(offset, _time(timestamp) if timestamp is not None else None, first, next_, clamp)


def _time(text: str) -> datetime:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a time such as 2026-12-01T08:30-03:00") from None
    if at.tzinfo is None:
        raise typer.BadParameter(f"{text!r} has no zone: add Z for UTC, or -03:00")
    return at


def _table(name: str, moves: Sequence[Move]) -> Table:
    table = Table("processor", "stream", "partition", "offset", "reads on at", "end", "records", "never read")
    for m in moves:
        was = "-" if m.was is None else f"{m.was:,}"
        numbers = (f"{m.to:,}", f"{m.end:,}", f"{m.records:,}", f"{m.passed:,}")
        table.add_row(name, m.partition.stream, str(m.partition.index), was, *numbers)
    return table


def _say_outlook(name: str, moves: Sequence[Move], outlook: Outlook | None) -> None:
    found = outlook or Outlook(sum(move.records for move in moves), 0)
    points = _compose.PROCESSORS[name].points_at is not None
    follow = (
        f"requests that would follow: {found.requests:,}" if points else f"mails that would follow: {found.mails:,}"
    )
    out.print(f"would read {found.records:,} records, {found.dead:,} of which cannot be taken; {follow}")
    if passed := sum(move.passed for move in moves):
        out.print(f"{passed:,} records that nobody has read would never be read")
    out.print("nothing was changed")


def _ask(moves: Sequence[Move], yes: bool) -> None:
    passed = sum(move.passed for move in moves)
    if not passed or yes:
        return
    err.print(f"{passed:,} records that nobody has read would never be read: who is named in them gets no mail")
    if not typer.confirm("Pass over them?", default=False, err=True):
        raise fail(ExitCode.FAILED, "nothing was changed; --yes passes over them without asking")
