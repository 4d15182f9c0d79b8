"""`afluente outbox`: events that failed, tried again."""

from typing import Annotated

import typer

from models.base import MAX_ID
from models.tables import OutboxEvent
from processors._commands import By, with_database
from processors._console import err, fail, named, out
from processors._retry import EVENTS, Wanted, retry_rows
from streams.exit_codes import ExitCode

app = typer.Typer(help="Outgoing events: try those again that failed.", no_args_is_help=True)


@app.callback()
def outbox() -> None:
    """Keep `retry` a word of its own, also while it is the only one."""


@app.command()
@named
def retry(
    by: By,
    ids: Annotated[list[int] | None, typer.Argument(metavar="[ID]...", min=1, max=MAX_ID, help="these events")] = None,
    event: Annotated[str | None, typer.Option(help="all failed ones of this name")] = None,
    error: Annotated[str | None, typer.Option(help="all failed ones with this text in their last error")] = None,
    everything: Annotated[bool, typer.Option("--all", help="all failed ones")] = False,
) -> None:
    """Let events be tried again from the first attempt on; what is sent, held or in flight stays as it is."""
    by_filter = event is not None or error is not None
    if [bool(ids), by_filter, everything].count(True) != 1:
        raise typer.BadParameter("say which: ids, or --event and --error, or --all")
    column = OutboxEvent.__table__.c  # type: ignore[attr-defined]
    conditions = [column.event_name == event] if event is not None else []
    conditions += [column.last_error.contains(error, autoescape=True)] if error is not None else []
    wanted = Wanted(EVENTS, by, ids or [], conditions)
    done = with_database(lambda engine: retry_rows(engine, wanted))
    for number, why in done.refused.items():
        sentence = f"there is no event {number}" if why == "does not exist" else f"event {number} {why}: not retried"
        err.print(sentence, markup=False)
    out.print(f"{len(done.done):,} event{'' if len(done.done) == 1 else 's'} retried")
    if ids and done.refused:
        raise fail(ExitCode.FAILED, f"{len(done.refused)} not retried")
