"""What a row's last_error says of a request: enough for a person to act, without secrets and personal data. Pure."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from processors._http.answer import Answer
from processors._http.request import RequestDescription
from streams.masking import PERSONAL_KEYS, mask

MAX_RETRY_AFTER = 900.0
"""Seconds; what a receiver asks for beyond that is not granted."""

SHORTEST = 4
"""Characters of a value of the payload that is looked for in an answer: shorter ones are in every text."""

PERSONAL_PARTS = (
    "name",
    "nome",
    "mail",
    "phone",
    "telefone",
    "cpf",
    "cnpj",
    "document",
    "documento",
    "address",
    "birth",
)
"""A field of a payload whose name holds one of these is somebody's own."""

LANE_FAULTS = {401, 403, 407, 429}
"""Answers that say nothing of the event: all events of this system get them. 5xx as well."""


def refusal(answer: Answer) -> str:
    """An answer that is no success, in words."""
    if 300 <= answer.status < 400:
        where = f" (Location: {answer.location})" if answer.location else ""
        return f"HTTP {answer.status}{where}: redirects are not followed; {answer.text}"
    return f"HTTP {answer.status}: {answer.text}"


def fault(status: int) -> str | None:
    """What this answer says of the system, None if it is about the event alone."""
    return f"HTTP {status}" if status >= 500 or status in LANE_FAULTS else None


def retry_after(answer: Answer, now: datetime) -> float:
    """For how many seconds a busy receiver wants to be left alone: as a number or a date; 0 where it says neither."""
    if answer.status not in {429, 503} or answer.retry_after is None:
        return 0.0
    text = answer.retry_after.strip()
    if text.isascii() and text.isdigit():
        return min(float(text[:9]), MAX_RETRY_AFTER)
    try:
        at = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    seconds = (at.replace(tzinfo=at.tzinfo or UTC) - now).total_seconds()
    return min(max(seconds, 0.0), MAX_RETRY_AFTER)


def clean(text: str, request: RequestDescription) -> str:
    """Without the request's secrets, and without what the payload says of a person, should an answer repeat it."""
    for secret in request.secrets:
        text = text.replace(secret, "***") if secret else text
    for value in sorted(set(_personal(_loaded(request.body))), key=len, reverse=True):
        text = text.replace(value, "***")
    return mask(text)


def _loaded(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _personal(value: object, personal: bool = False) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _personal(item, personal or _is_personal(key))
    elif isinstance(value, list):
        for item in value:
            yield from _personal(item, personal)
    elif personal and value is not None and not isinstance(value, bool) and len(str(value)) >= SHORTEST:
        yield str(value)


def _is_personal(key: str) -> bool:
    key = key.lower()
    return key in PERSONAL_KEYS or any(part in key for part in PERSONAL_PARTS)
