"""How long to wait after wrong passwords. Pure, in memory: a restart forgets it.

Three counters. That of a *user* (from browsers that the user has never signed in with) bounds guesses from everywhere;
that of an *address* bounds guesses at many users from one place; that of a *device*, a browser in which the user has
signed in before, stands in place of both. So a stranger who guesses makes other strangers wait, and never the person in
their own browser; and nobody waits longer than a quarter of an hour after the last try that counted.
"""

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

Key = tuple[Literal["user", "address", "device"], str]

FREE: Mapping[str, int] = {"user": 5, "device": 5, "address": 20}
"""Wrong passwords without a wait."""
FIRST_WAIT = 30.0
LONGEST_WAIT = 900.0
FORGET = 3600.0
"""After so long without a wrong password, a counter begins anew."""
MOST_KEYS = 10_000
BUCKETS = 512
"""Names share so many counters: no list of names fills the memory, and one that nobody has locks like any other."""


@dataclass(slots=True)
class _Count:
    failures: int = 0
    until: float = 0.0
    last: float = 0.0


class Lockout:
    """`clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: dict[Key, _Count] = {}

    def begin(self, keys: Sequence[Key]) -> float:
        """Seconds to wait before a password is looked at; 0.0: go on, and the try counts as wrong until it is right.

        Counted before, so that many at once are not more than one after the other. A try while it is locked counts
        nothing: whoever goes on guessing does not make the wait longer.
        """
        now = self._clock()
        wait = max((self._counts[key].until - now for key in keys if key in self._counts), default=0.0)
        if wait > 0:
            return wait
        self._make_room(now)
        for key in keys:
            self._count(key, now)
        return 0.0

    def succeeded(self, keys: Sequence[Key]) -> None:
        """The password was right: what was counted for it is taken back, and the user's counter begins anew.

        That of an address only loses this one try: else who has a password could guess at others' without end.
        """
        for key in keys:
            count = self._counts.get(key)
            if count is None:
                continue
            count.failures, count.until = count.failures - 1, 0.0
            if key[0] != "address" or count.failures <= 0:
                del self._counts[key]

    def _count(self, key: Key, now: float) -> None:
        count = self._counts.setdefault(key, _Count())
        if now > count.last + FORGET:
            count.failures = 0
        count.failures += 1
        count.last = now
        beyond = count.failures - FREE[key[0]]
        if beyond >= 0:
            count.until = now + min(FIRST_WAIT * 2.0 ** min(beyond, 10), LONGEST_WAIT)

    def _make_room(self, now: float) -> None:
        if len(self._counts) < MOST_KEYS:
            return
        kept = [(key, count) for key, count in self._counts.items() if now <= count.last + FORGET]
        kept.sort(key=lambda item: (item[1].until, item[1].last))  # those that lock longest stay
        self._counts = dict(kept[len(kept) // 2 :])


def keys_of(user: str, address: str, device: str | None) -> list[Key]:
    """The counters of one try."""
    if device is not None:
        return [("device", device)]
    bucket = int.from_bytes(sha256(user.encode(errors="replace")).digest()[:4], "big") % BUCKETS
    return [("user", str(bucket)), ("address", _network(address))]


def _network(address: str) -> str:
    """An IPv6 address stands for its /64: whoever has one has all of it."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    return str(ipaddress.ip_network((parsed, 64), strict=False).network_address)
