"""What is said of a request: pure data, which the sender executes by the same rules for all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

MAX_BODY = 2048
"""Bytes of an answer that are read unless a request wants more; a connection with more on it is closed."""


def is_2xx(status: int) -> bool:
    """What counts as success unless a dispatcher says otherwise."""
    return 200 <= status < 300


@dataclass(frozen=True, slots=True)
class RequestDescription:
    """One request. `timeout` bounds the whole exchange, in seconds; `secrets` are never shown in an error.

    An empty body is none at all. `repeatable` says that the receiver drops repeats, so that a request whose kept
    connection was closed may go out once more; one that is not gets a connection of its own.
    """

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes
    timeout: float
    success: Callable[[int], bool] = is_2xx
    secrets: tuple[str, ...] = ()
    repeatable: bool = True
    max_body: int = MAX_BODY
