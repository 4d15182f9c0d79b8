"""`afluente dlq`: the dead-letter queue of the publisher's lists."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer
from rich.table import Table

from processors import _compose, _dlq
from processors._amqp import Channel, Delivery
from processors._console import fail, named, out
from processors._dlq import Letter
from processors._settings import Settings, load_settings
from streams.exit_codes import ExitCode

T = TypeVar("T")

app = typer.Typer(help="The dead-letter queue of the publisher's lists.", no_args_is_help=True)


@app.command("list")
@named
def list_letters(
    limit: Annotated[int, typer.Option(min=1, help="how many of the oldest to show")] = 20,
) -> None:
    """Say of each letter why it lies there. Nothing of a list is shown, and nothing is taken away."""

    async def work(settings: Settings, channel: Channel) -> list[Letter]:
        found = _dlq.deliveries(channel, _compose.queues(settings).dead_queue, limit)
        return [_dlq.describe(number, delivery, settings.amqp_max_body_bytes) async for number, delivery in found]

    letters = _with_channel(work)
    table = Table("no.", "reason", "error", "bytes", "died at", "batch", "index")
    for letter in letters:
        index = "" if letter.index is None else str(letter.index)
        table.add_row(
            *(str(letter.number), letter.reason, letter.error, f"{letter.size:,}", letter.died_at),
            *(letter.batch[:12], index),
        )
    out.print(table if letters else "no dead letters")


@app.command()
@named
def show(
    number: Annotated[int, typer.Argument(min=1, help="its number in `list`")],
    body: Annotated[bool, typer.Option("--body", help="write its bytes to stdout, and nothing else")] = False,
) -> None:
    """Show the properties of one letter, or its original bytes. These are people's data."""

    async def work(settings: Settings, channel: Channel) -> Delivery | None:
        async for n, delivery in _dlq.deliveries(channel, _compose.queues(settings).dead_queue, number):
            if n == number:
                return delivery
        return None

    delivery = _with_channel(work)
    if delivery is None:
        raise fail(ExitCode.BAD_INPUT, f"there is no letter {number}")
    if body:
        sys.stdout.buffer.write(delivery.body)
        sys.stdout.buffer.flush()
    else:
        text = json.dumps({**delivery.properties, "bytes": len(delivery.body)}, indent=2, default=str)
        out.print(text, markup=False)


@app.command()
@named
def requeue(
    limit: Annotated[int | None, typer.Option(min=1, help="give back at most so many; default: all")] = None,
    reason: Annotated[str | None, typer.Option(help="only those of this reason")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say how many")] = False,
) -> None:
    """Give letters back to the publisher's queue, the oldest first. What intake could not take stays."""

    async def work(settings: Settings, channel: Channel) -> _dlq.Requeued:
        queues, size = _compose.queues(settings), settings.amqp_max_body_bytes
        return await _dlq.requeue(channel, queues, size, limit=limit, reason=reason, dry_run=dry_run)

    done = _with_channel(work)
    out.print(f"{done.given_back} {'would be given back' if dry_run else 'given back'}")
    for why, count in sorted(done.left.items()):
        out.print(f"{count} left: {why}", markup=False)


def _with_channel(work: Callable[[Settings, Channel], Awaitable[T]]) -> T:
    async def run(settings: Settings) -> T:
        connection = await _compose.connect_amqp(settings, "afluente dlq")
        try:
            return await work(settings, await connection.channel())
        finally:
            await connection.close()

    return asyncio.run(run(load_settings()))
