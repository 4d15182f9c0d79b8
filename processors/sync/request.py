"""What a dispatcher says of a request: pure data, which the sender executes by the same rules for all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from processors._settings import Settings


def is_2xx(status: int) -> bool:
    """What counts as success unless a dispatcher says otherwise."""
    return 200 <= status < 300


@dataclass(frozen=True, slots=True)
class RequestDescription:
    """One request. `timeout` bounds the whole exchange, in seconds; `secrets` are never shown in an error."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes
    timeout: float
    success: Callable[[int], bool] = is_2xx
    secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """Where events of one name go. `target` names the system: events of one target share a bound and a breaker.

    `describe` is pure: the payload as JSON text, and the settings. It raises NotConfigured.
    """

    target: str
    describe: Callable[[str, Settings], RequestDescription]


class NotConfigured(Exception):
    """Settings that this event needs are missing; the text names them."""


def required(settings: Settings, *names: str) -> list[Any]:
    """The values of these settings. Raises NotConfigured, which names all that are not set."""
    values = [getattr(settings, name.lower()) for name in names]
    missing = [name for name, value in zip(names, values, strict=True) if value is None]
    if missing:
        raise NotConfigured(f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not set: nothing was sent")
    return values
