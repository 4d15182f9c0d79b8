"""How many may start now, when so many a second are allowed. Pure: the clock's reading goes in, a number comes out."""


class Pace:
    """At most rate x elapsed + 1 grants since the first. Without a rate it grants everything."""

    def __init__(self, per_second: float | None) -> None:
        self.per_second = per_second
        self._next = 0.0

    def grant(self, wanted: int, now: float) -> int:
        """How many of `wanted` may start at `now` (seconds of any clock that does not go backwards)."""
        if self.per_second is None:
            return wanted
        granted = 0
        while granted < wanted and self._next <= now:
            self._next = max(self._next, now - 1 / self.per_second) + 1 / self.per_second
            granted += 1
        return granted

    def wait(self, now: float) -> float:
        """Seconds until the next one may start."""
        return 0.0 if self.per_second is None else max(0.0, self._next - now)
