"""What commands share that ask the database or name processors; how they speak is `_console.py`."""

import asyncio
import getpass
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, TypeVar

import typer
from sqlalchemy.ext.asyncio import AsyncEngine

from processors import _compose, _house
from processors._settings import Settings, load_settings
from streams.database import connect
from streams.log import Log

T = TypeVar("T")

ALL = "all"


def processor_names(wanted: Sequence[str]) -> list[str]:
    """These processors, each once; every one for `all`. Raises BadParameter for a name that none has."""
    unknown = [name for name in wanted if name not in _compose.PROCESSORS and name != ALL]
    if unknown:
        known = ", ".join([*_compose.PROCESSORS, ALL])
        raise typer.BadParameter(f"there is no processor {', '.join(map(repr, unknown))}; there are {known}")
    return list(_compose.PROCESSORS) if ALL in wanted else list(dict.fromkeys(wanted))


def reading_processor(wanted: str) -> str:
    """The one processor of this name, which must have a position in a stream; else BadParameter."""
    names = processor_names([wanted])
    readers = [name for name, entry in _compose.PROCESSORS.items() if entry.reads is not None]
    if len(names) > 1 or _compose.PROCESSORS[names[0]].reads is None:
        raise typer.BadParameter(
            f"{wanted} reads no stream: it has no position that could be changed; these have: {', '.join(readers)}"
        )
    return names[0]


def with_database(work: Callable[[AsyncEngine], Coroutine[Any, Any, T]]) -> T:
    """Run `work` on a database of the newest schema. Raises DatabaseAway and NotMigrated; nothing is waited for."""
    with _house.database_errors():
        return asyncio.run(_on_database(load_settings(), work))


def with_database_and_log(label: str, work: Callable[[Settings, AsyncEngine, Log], Coroutine[Any, Any, T]]) -> T:
    """The same with the log, opened. Raises what a log raises as well."""
    settings = load_settings()

    async def opened(engine: AsyncEngine) -> T:
        log = _house.connect_log(settings, label)
        try:
            await log.open()
            return await work(settings, engine, log)
        finally:
            await log.close()

    return with_database(opened)


async def _on_database(settings: Settings, work: Callable[[AsyncEngine], Coroutine[Any, Any, T]]) -> T:
    engine = connect(settings.database_url.get_secret_value(), "afluente")
    try:
        await _house.check_migrated(engine)
        return await work(engine)
    finally:
        await engine.dispose()


def user() -> str:
    """The user of the operating system, who has no name in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


By = Annotated[str, typer.Option("--by", help="who does it, for the audit", default_factory=user)]
"""The option that says who."""
