"""What a list of rows is narrowed to: read from a query or a form, written back into links. Pure.

Nothing personal is a filter: it stands in addresses, and those stand in histories and in logs of proxies.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta
from typing import Self
from urllib.parse import urlencode

from processors.admin.words import BRASILIA, STATES

MAX_TEXT = 100
_HEX = re.compile(r"[0-9a-f]{4,64}")


class BadFilter(ValueError):
    """A field that cannot be read as it was written; the text says so in the reader's words."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which rows are meant; "" and None mean any. `since` and `until` are days in Brasília, both included."""

    state: str = ""
    name: str = ""
    batch: str = ""
    since: date | None = None
    until: date | None = None
    text: str = ""
    before: int | None = None
    """Only rows with a smaller id: the next page."""

    @classmethod
    def read(cls, fields: Mapping[str, str]) -> Self:
        """From the names that `query` writes. Raises BadFilter."""
        state, batch, text = fields.get("state", ""), fields.get("batch", "").strip().lower(), fields.get("q", "")
        if state and state not in STATES:
            raise BadFilter("este estado não existe")
        if batch and not _HEX.fullmatch(batch):
            raise BadFilter("um lote é o começo do seu número: ao menos 4 dígitos hexadecimais")
        text = text.strip()
        if len(text) > MAX_TEXT or "\0" in text:
            raise BadFilter(f"a busca tem no máximo {MAX_TEXT} caracteres")
        since, until = _day(fields.get("since", "")), _day(fields.get("until", ""))
        if since and until and since > until:
            raise BadFilter("o período começa depois de terminar")
        return cls(state, fields.get("name", "")[:200], batch, since, until, text, _id(fields.get("before", "")))

    def fields(self) -> dict[str, str]:
        """What says the same in a form."""
        values = {
            "state": self.state,
            "name": self.name,
            "batch": self.batch,
            "since": self.since.isoformat() if self.since else "",
            "until": self.until.isoformat() if self.until else "",
            "q": self.text,
            "before": str(self.before) if self.before is not None else "",
        }
        return {name: value for name, value in values.items() if value}

    def query(self) -> str:
        """The same as a query, "" for no filter at all."""
        return f"?{urlencode(self.fields())}" if self.fields() else ""

    def with_state(self, state: str) -> Self:
        """The first page of those in this state."""
        return replace(self, state=state, before=None)

    def older(self, before: int | None) -> Self:
        """The page after this id."""
        return replace(self, before=before)

    @property
    def narrowed(self) -> bool:
        """Whether it is more than a page of everything."""
        return bool(replace(self, before=None).fields())

    @property
    def begins(self) -> datetime | None:
        """The first moment that is meant."""
        return datetime.combine(self.since, time(), BRASILIA) if self.since else None

    @property
    def ends(self) -> datetime | None:
        """The first moment that is not."""
        return datetime.combine(self.until + timedelta(days=1), time(), BRASILIA) if self.until else None


def _day(text: str) -> date | None:
    if not text.strip():
        return None
    try:
        day = date.fromisoformat(text.strip())
    except ValueError:
        raise BadFilter("uma data se escreve AAAA-MM-DD") from None
    if not 2000 <= day.year <= 2200:
        raise BadFilter("esta data está fora do calendário da página")
    return day


def _id(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None
