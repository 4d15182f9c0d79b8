"""How a process ends, so that people and machines need not read its log to know why."""

from collections.abc import Iterator
from enum import IntEnum

from streams import errors


class ExitCode(IntEnum):
    """The exit codes of every command; 2 is what shells and typer use for a wrong command line."""

    OK = 0
    FAILED = 1
    USAGE = 2
    BAD_SETTINGS = 3
    DATABASE_AWAY = 4
    LOG_AWAY = 5
    LOG_REFUSED = 6
    LOG_IN_USE = 7
    GRACE_OVER = 8
    STOPPED_TWICE = 9
    NOT_MIGRATED = 10
    BAD_INPUT = 11
    DRIFT = 12


# The first that fits is taken: subclasses stand before their base.
_CODES: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (errors.BadSettings, ExitCode.BAD_SETTINGS),
    (errors.DatabaseAway, ExitCode.DATABASE_AWAY),
    (errors.NotMigrated, ExitCode.NOT_MIGRATED),
    (errors.LogInUse, ExitCode.LOG_IN_USE),
    (errors.LogRefused, ExitCode.LOG_REFUSED),
    (errors.LogError, ExitCode.LOG_AWAY),
)


def exit_code(error: BaseException) -> ExitCode:
    """The code for an error that ended a process; of a group, that of the first error that has one of its own."""
    for leaf in _leaves(error):
        for kind, code in _CODES:
            if isinstance(leaf, kind):
                return code
    return ExitCode.FAILED


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
