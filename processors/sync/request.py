"""What a dispatcher is, and what it says when settings are missing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from processors._http.request import RequestDescription
from processors._settings import Settings


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
