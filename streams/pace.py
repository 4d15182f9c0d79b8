"""How many may start now, when so many a second are allowed. Pure: the clock's reading goes in, a number comes out."""


class Pace:
    """At most rate x elapsed + 1 grants since the first. Without a rate it grants everything."""

    def __init__(self, per_second: float | None) -> None:
        self.per_second = per_second
        self._next: float | None = None
        """When the next one may start; None before the first."""

    def grant(self, wanted: int, now: float) -> int:
        """How many of `wanted` may start at `now` (seconds of any clock that does not go backwards)."""
        if self.per_second is None:
            return wanted
        granted, due, step = 0, now if self._next is None else self._next, 1 / self.per_second
        while granted < wanted and due <= now:
            due = max(due, now - step) + step  # who comes late may catch up by one
            granted += 1
        self._next = due
        return granted

    def wait(self, now: float) -> float:
        """Seconds until the next one may start."""
        return 0.0 if self._next is None else max(0.0, self._next - now)
