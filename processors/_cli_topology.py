"""`afluente topology`: what must stand at the broker, compared with the settings and completed."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import typer

from processors import _compose, _house, _topology
from processors._amqp import vhost
from processors._console import named, out
from processors._settings import Settings, load_settings
from processors._topology import Amqp, Finding
from streams.exit_codes import ExitCode
from streams.log import Log, StreamSpec

app = typer.Typer(help="Exchange, queues, dead letters and streams at the broker.", no_args_is_help=True)

Work = Callable[[Log, Iterable[StreamSpec], Amqp | None], Awaitable[list[Finding]]]


@app.command()
@named
def plan() -> None:
    """Say what `apply` would make, and what it could not change."""
    _say(_do(_topology.look))


@app.command()
@named
def apply() -> None:
    """Make what is missing and set the policy for dead letters. May be repeated; messages stay where they are."""
    _end(_do(_topology.apply))


@app.command()
@named
def check() -> None:
    """As `plan`, but ends with the code of drift when anything is missing or differs."""
    _end(_do(_topology.look))


def _do(work: Work) -> list[Finding]:
    return asyncio.run(_with_log(load_settings(), work))


async def _with_log(settings: Settings, work: Work) -> list[Finding]:
    log = _house.connect_log(settings, "afluente topology")
    try:
        await log.open()
        return await work(log, _compose.streams(settings), _amqp(settings))
    finally:
        await log.close()


def _amqp(settings: Settings) -> Amqp | None:
    """None where there is no intake."""
    if settings.amqp_url is None:
        return None
    return Amqp(
        _compose.queues(settings),
        lambda: _compose.connect_amqp(settings, "afluente topology"),
        _compose.management(settings),
        vhost(settings.amqp_url.get_secret_value()),
    )


def _say(findings: list[Finding]) -> None:
    for finding in findings:
        out.print(f"{finding.state:8} {finding.what}" + (f": {finding.says}" if finding.says else ""), markup=False)


def _end(findings: list[Finding]) -> None:
    _say(findings)
    if _topology.drifted(findings):
        raise typer.Exit(ExitCode.DRIFT)
