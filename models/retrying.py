"""Which row a person may have tried again: one rule for e-mails and events, said by name when the answer is no."""

from datetime import datetime
from typing import Literal

Why = Literal["was sent", "is held", "is in flight"]
"""Why not. A row without status is one of the old code, which dispatched it."""


class NotRetried(ValueError):
    """The row is sent, held or in flight."""


def why_not_retryable(status: str | None, held: bool, lease_until: datetime | None, now: datetime) -> Why | None:
    """Why a row of this state cannot be retried at this time, None if it can."""
    if status is None or status == "sent":
        return "was sent"
    if held:
        return "is held"
    if lease_until is not None and lease_until > now:
        return "is in flight"
    return None
