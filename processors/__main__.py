"""The command line: `afluente`, also `python -m processors`.

Each command reads the settings, does its work and ends with a named exit code. Not here: how real things are put
together (`_compose.py`) and run (`_serve.py`).
"""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import orjson
import typer
from sqlalchemy.ext.asyncio import AsyncEngine

from models.base import MAX_ID
from models.slices import InvalidImport
from processors import (
    _cli_admin,
    _cli_dead_letters,
    _cli_dlq,
    _cli_outbox,
    _cli_positions,
    _cli_repayment,
    _cli_topology,
    _compose,
    _house,
    _migrate,
    _publish,
    _serve,
    _status,
    _tables,
)
from processors._backfill import backfill as backfill_rows
from processors._commands import ALL, processor_names, with_database
from processors._console import err, fail, named, out
from processors._settings import Settings, load_settings
from streams.exit_codes import ExitCode

STDIN = "<stdin>"

EPILOG = "Exit codes: " + ", ".join(f"{code.value} {code.name.lower()}" for code in ExitCode) + "."

app = typer.Typer(
    help="Splits import batches into one small stream per recipient and mails each of them once.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # its tracebacks print local variables, which are people's data
)
app.add_typer(_cli_topology.app, name="topology")
app.add_typer(_cli_dlq.app, name="dlq")
app.add_typer(_cli_dead_letters.app, name="dead-letters")
app.add_typer(_cli_outbox.app, name="outbox")
app.add_typer(_cli_repayment.app, name="repayment")
app.add_typer(_cli_admin.app, name="admin")


def main() -> None:
    """The installed command."""
    app(prog_name="afluente")


# ---- run


@app.command()
@named
def run(
    processors: Annotated[
        list[str], typer.Argument(help=f"{', '.join(_compose.PROCESSORS)}; several run in one process, or {ALL}")
    ],
) -> None:
    """Run processors until SIGTERM or SIGINT; what is in flight is finished and recorded."""
    names = processor_names(processors)
    settings = load_settings()
    if ALL in processors:
        names = _compose.all_names(settings)
    _compose.check(settings, names)
    raise typer.Exit(_serve.serve(settings, names))


# ---- the database


@app.command()
@named
def migrate(revision: Annotated[str, typer.Option(help="where to stop")] = "head") -> None:
    """Bring the database to the newest schema. Several at once wait for one another."""
    from alembic.util import CommandError  # noqa: PLC0415 - large, and needed by nobody who runs

    url = load_settings().database_url.get_secret_value()
    try:
        with _house.database_errors():
            done = asyncio.run(_migrate.migrate(url, revision))
    except CommandError as error:
        raise fail(ExitCode.USAGE, str(error)) from None
    out.print("migrated" if done else "nothing to do", f"to revision {revision}" if done else f"at revision {revision}")


@app.command()
@named
def backfill() -> None:
    """Give the rows that the old code inserted their status and key. May be run again at any time."""

    async def work(engine: AsyncEngine) -> None:
        found = await backfill_rows(engine)
        out.print(f"{found.rows} rows, {found.keys} of them with a key")

    with_database(work)


for command in (_cli_positions.pause, _cli_positions.resume, _cli_positions.replay):
    app.command()(command)


# ---- batches


@app.command()
@named
def publish(
    file: Annotated[
        typer.FileBinaryRead,
        typer.Argument(metavar="FILE|-", help="a JSON array of registrations; - is standard input"),
    ],
) -> None:
    """Write a batch to the stream of imports. To publish it again mails nobody twice."""
    from rich.progress import MofNCompleteColumn, Progress  # noqa: PLC0415 - nobody else shows one

    settings = load_settings()
    body = file.read()
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("publishing", total=None)
        try:
            done = asyncio.run(
                _publishing(settings, body, lambda items, total: progress.update(task, completed=items, total=total))
            )
        except InvalidImport as error:
            raise fail(ExitCode.BAD_INPUT, f"{getattr(file, 'name', STDIN)}: {error}; nothing was published") from None
    for index, size in done.oversize:
        err.print(f"item {index} has {size:,} bytes, more than a message may have: it will be rejected as too_large")
    records = f"{done.records} record{'' if done.records == 1 else 's'}"
    out.print(f"batch {done.batch_id}: {done.items:,} registrations in {records} of {settings.imports_stream}")


async def _publishing(settings: Settings, body: bytes, progress: Callable[[int, int], None]) -> _publish.Published:
    log = _house.connect_log(settings, "afluente publish")
    try:
        await log.open()
        return await _publish.publish(log, _compose.imports_spec(settings), body, progress)
    finally:
        await log.close()


@app.command()
@named
def status(
    as_json: Annotated[bool, typer.Option("--json", help="for programs, all on one line")] = False,
    batches: Annotated[int, typer.Option(min=0, max=MAX_ID, help="how many of the newest batches to show")] = 20,
) -> None:
    """How far each processor is, and what became of each batch; counted from rows at the time of asking."""
    settings = load_settings()
    log = _house.connect_log(settings, "afluente status")
    readers = _compose.readers(settings)

    async def work(engine: AsyncEngine) -> _status.Status:
        try:
            return await _status.status(engine, log, readers, batches)
        finally:
            await log.close()

    found = with_database(work)
    if found.log_away is not None:
        err.print(f"the log does not answer, ends are those last seen: {found.log_away}", markup=False)
    if as_json:
        sys.stdout.write(orjson.dumps(found).decode() + "\n")
    else:
        for table in _tables.tables(found):
            out.print(table)


@app.command(name="demo")
@named
def show_demo(
    folder: Annotated[Path | None, typer.Option(help="keep its files here; default: a temporary folder")] = None,
) -> None:
    """See it work on this machine alone: 1,000 registrations, a mail server that misbehaves, no services, no root."""
    from processors._demo.demo import demo  # noqa: PLC0415 - a mail server that no other command needs
    from processors._demo.display import Display  # noqa: PLC0415

    outcome = demo(folder, Display(out))
    for sentence in outcome.disagreements:
        err.print(f"afluente: {sentence}", markup=False)
    sys.stdout.write(orjson.dumps(outcome.result).decode() + "\n")
    if outcome.disagreements:
        raise typer.Exit(ExitCode.FAILED)


if __name__ == "__main__":
    main()
