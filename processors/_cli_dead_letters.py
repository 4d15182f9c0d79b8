"""`afluente dead-letters`: what was given up, looked at and tried again."""

import asyncio
import re
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import orjson
import typer
from rich.markup import escape
from rich.table import Table
from sqlalchemy.ext.asyncio import AsyncEngine

from models.base import MAX_ID
from processors import _compose, _house, _redrive
from processors._commands import By, with_database
from processors._console import err, fail, named, out
from processors._redrive import TABLES, Outlook, Redrive, Redriven, Stream, Wish
from processors._settings import load_settings
from streams.database import dialect, driver_connection
from streams.exit_codes import ExitCode
from streams.redrive import Filter, Letters
from streams.sql import Row, sql

app = typer.Typer(help="What was given up: look at it, try it again.", no_args_is_help=True)

Reason = Annotated[str | None, typer.Option(help="only those of this reason")]
Processor = Annotated[str | None, typer.Option(help="only those of this processor")]
Batch = Annotated[str | None, typer.Option(help="only those of this batch: its id, or how that begins")]
Older = Annotated[str | None, typer.Option(metavar="AGE", help="only those that are older, as 90s, 30min, 12h or 7d")]
Newer = Annotated[str | None, typer.Option(metavar="AGE", help="only those that are not older than this")]

_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


# ---- look


@app.command("list")
@named
def list_letters(  # noqa: PLR0913 - each is an option that people type
    reason: Reason = None,
    processor: Processor = None,
    batch: Batch = None,
    older: Older = None,
    newer: Newer = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="also those that nobody has to look at any more")] = False,
    limit: Annotated[int, typer.Option(min=1, max=MAX_ID, help="how many of the newest to show")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="for programs, one letter a line")] = False,
) -> None:
    """Show the newest open ones, and count all: open is what still waits for somebody."""
    wanted = _filter(reason, processor, batch, older, newer, open_only=not everything)

    async def work(engine: AsyncEngine) -> tuple[list[Row], list[Row]]:
        async with driver_connection(engine) as connection:
            letters = Letters(sql(connection, dialect(engine)), TABLES)
            return await letters.newest(wanted, limit), await letters.count(wanted)

    found, counts = with_database(work)
    if as_json:
        for letter in found:
            sys.stdout.write(orjson.dumps(dict(letter)).decode() + "\n")
        return
    if found:
        out.print(_table(found))
    total = sum(row["letters"] for row in counts)
    out.print(f"{total:,} {'dead letters' if everything else 'open'}" + (":" if total else ""))
    for row in counts:
        out.print(f"{row['letters']:>9,}  {row['processor']}  {row['reason']}  {row['state']}", markup=False)


def _table(found: Sequence[Row]) -> Table:
    table = Table("id", "since (UTC)", "processor", "reason", "state", "tries", "of", "error")
    for letter in found:
        table.add_row(
            *(str(letter["id"]), str(letter["created_at"])[:19], letter["processor"], letter["reason"]),
            *(letter["state"], str(letter["attempts"]), _origin(letter), escape(letter["error"][:200])),
        )
    return table


def _origin(letter: Row) -> str:
    if letter["row_id"] is not None:
        return f"row {letter['row_id']}"
    place = f"{letter['source_stream']} {letter['source_partition']} at {letter['source_offset']}"
    return place if letter["item_index"] is None else f"{place}, item {letter['item_index']}"


@app.command()
@named
def show(
    number: Annotated[int, typer.Argument(min=1, max=MAX_ID, help="its id in `list`")],
    body: Annotated[bool, typer.Option("--body", help="write its original bytes to stdout, and nothing else")] = False,
) -> None:
    """Show all that is known of one letter, or its original bytes. Those are people's data."""

    async def work(engine: AsyncEngine) -> tuple[Row | None, bytes | None]:
        async with driver_connection(engine) as connection:
            letters = Letters(sql(connection, dialect(engine)), TABLES)
            return await letters.one(number), await letters.body(number)

    letter, original = with_database(work)
    if letter is None:
        raise fail(ExitCode.BAD_INPUT, f"there is no dead letter {number}")
    if body:
        if original is None:
            raise fail(ExitCode.BAD_INPUT, f"dead letter {number} has no bytes of its own: it is of {_origin(letter)}")
        sys.stdout.buffer.write(original)
        sys.stdout.buffer.flush()
        return
    fields = {**letter, "body_bytes": None if original is None else len(original)}
    out.print(orjson.dumps(fields, option=orjson.OPT_INDENT_2).decode(), markup=False)


# ---- try again


@app.command()
@named
def redrive(  # noqa: PLR0913 - as above
    reason: Reason = None,
    processor: Processor = None,
    batch: Batch = None,
    older: Older = None,
    newer: Newer = None,
    *,
    ids: Annotated[
        list[int] | None, typer.Option("--id", min=1, max=MAX_ID, help="this one; may be given more than once")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="all that are open")] = False,
    include_unknown: Annotated[
        bool, typer.Option("--include-unknown", help="also those held, whose mail may have arrived: it may come twice")
    ] = False,
    rate: Annotated[float | None, typer.Option(min=0.001, help="so many a second; default: as fast as it goes")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say how many mails and events would follow")] = False,
    by: By,
) -> None:
    """Try again what is meant and open. Ctrl-C stops it after the letter under way; the same command goes on."""
    chosen = any(value is not None for value in (reason, processor, batch, older, newer, ids))
    if chosen == everything:
        raise typer.BadParameter("say which: by --id, --reason, --processor, --batch, --older, --newer; or --all")
    wanted = _filter(reason, processor, batch, older, newer, open_only=not ids, ids=ids or ())
    wish = Wish(wanted, by, rate, include_unknown)
    if dry_run:
        _say_outlook(with_database(lambda engine: _redrive.forecast(engine, wish, _new_keys())))
        return
    done = with_database(lambda engine: _run(engine, wish))
    _say(done.refused, f"{done.done:,} redriven")
    if done.log_away is not None:
        err.print(f"{done.left:,} left: the same command goes on when the log is there")
        raise done.log_away
    if done.left:
        raise fail(ExitCode.FAILED, f"stopped, {done.left:,} left: the same command goes on")


async def _run(engine: AsyncEngine, wish: Wish) -> Redriven:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def stop_once() -> None:
        """The second signal ends the process as usual."""
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop_once)
    stream = Stream(_house.connect_log(load_settings(), "afluente redrive"))
    try:
        return await Redrive(engine, stream, wish, _tell).run(stop)
    finally:
        await stream.close()


def _tell(letter_id: int, reason: str | None) -> None:
    if reason is not None:
        err.print(f"dead letter {letter_id} not redriven: {reason}", markup=False)


def _new_keys() -> Mapping[str, Any]:
    return {name: entry.new_keys for name, entry in _compose.PROCESSORS.items() if entry.new_keys is not None}


def _say_outlook(outlook: Outlook) -> None:
    _say(outlook.refused, f"{outlook.letters:,} would be redriven")
    if outlook.dead:
        out.print(f"{outlook.dead:,} of them would be dead letters again")
    requests = f"; repayments: {outlook.requests:,}" if outlook.requests else ""
    out.print(f"mails that would follow: {outlook.mails:,}; events: {outlook.events:,}{requests}; nothing was changed")


def _say(refused: Counter[str], sentence: str) -> None:
    out.print(sentence)
    for why, count in sorted(refused.items()):
        out.print(f"{count:,} not: {why}", markup=False)


# ---- filters


def _filter(
    reason: str | None, processor: str | None, batch: str | None, older: str | None, newer: str | None, *,
    open_only: bool, ids: Sequence[int] = (),
) -> Filter:  # fmt: skip
    if batch is not None and not re.fullmatch("[0-9a-f]{1,64}", batch):
        raise typer.BadParameter("a batch id has up to 64 hexadecimal digits")
    return Filter(reason, processor, batch, ids, _seconds(older), _seconds(newer), open_only)


def _seconds(age: str | None) -> float | None:
    if age is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h|d)", age)
    if not found:
        raise typer.BadParameter(f"{age!r} is not an age such as 90s, 30min, 12h or 7d")
    return float(found[1]) * _UNITS[found[2]]
