"""What a browser has sent with a form: read with a limit, as text."""

from collections.abc import Sequence
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.requests import Request

MAX_BYTES = 64 * 1024
MAX_FIELDS = 1000


class Form:
    """The fields, in order; a name may come more than once."""

    def __init__(self, fields: Sequence[tuple[str, str]]) -> None:
        self._fields = fields

    def get(self, name: str) -> str:
        """The first of this name without blanks around it, "" if there is none."""
        return next((value.strip() for key, value in self._fields if key == name), "")

    def exact(self, name: str) -> str:
        """The same as it was typed."""
        return next((value for key, value in self._fields if key == name), "")

    def numbers(self, name: str) -> list[int]:
        """All of this name that are numbers of rows."""
        values = [value for key, value in self._fields if key == name]
        return [int(value) for value in values if value.isascii() and value.isdigit() and len(value) < 19]

    def as_dict(self) -> dict[str, str]:
        """The first of each name."""
        return {key: value.strip() for key, value in reversed(self._fields)}


async def read_form(request: Request) -> Form:
    """Raises HTTPException: 413 for a large body, 415 for one that is no form, 400 for a broken one."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        raise HTTPException(415)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BYTES:
            raise HTTPException(413)
    try:
        fields = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict")
    except ValueError:
        raise HTTPException(400) from None
    if any("\0" in value for _, value in fields):  # no text of the database holds one
        raise HTTPException(400)
    return Form(fields)
