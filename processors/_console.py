"""How every command speaks: results on stdout, all else on stderr, and a named exit code with one sentence.

Not here: the commands (`__main__.py` and `_cli_*.py`).
"""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec

import typer
from rich.console import Console

from streams.errors import StreamsError
from streams.exit_codes import ExitCode, exit_code

P = ParamSpec("P")

PIPE_WIDTH = 140
"""Room for whole tables where there is no terminal that says how much it has."""

out = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
err = Console(soft_wrap=True, highlight=False, stderr=True)


def named(command: Callable[P, None]) -> Callable[P, None]:
    """Say in one line on stderr what went wrong, without traceback, and end with the code that has its name."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except* StreamsError as group:
            for line in dict.fromkeys(map(str, _leaves(group))):
                err.print(f"afluente: {line}", markup=False)
            code = exit_code(group)
        else:
            return
        raise typer.Exit(code)

    return wrapped


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def fail(code: ExitCode, sentence: str) -> typer.Exit:
    """To be raised: say the sentence and end with the code."""
    err.print(f"afluente: {sentence}", markup=False)
    return typer.Exit(code)
