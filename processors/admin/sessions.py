"""Sessions in signed cookies: who, since when, last seen when. Pure, but for the ends that this process remembers.

A cookie is all there is of a session, so that a restart signs nobody out. What a stateless cookie cannot do is to end
before its time: sign-outs are remembered in memory until the cookie would be over anyway, and a restart forgets them
(docs/admin-page.md).
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from itsdangerous import BadSignature, URLSafeSerializer

DEVICE_SECONDS = 90 * 24 * 3600
LOGIN_SECONDS = 3600
"""How long a form for signing in may lie open."""
RENEW_SECONDS = 60
"""A cookie is written anew when it was last written longer ago than that."""


@dataclass(frozen=True, slots=True)
class Session:
    """One browser's. `user` is None until somebody signs in; times in seconds since 1970."""

    id: str
    user: str | None
    mark: str
    began: float
    seen: float


class Sessions:
    """Makes and reads cookies. `clock` tells seconds since 1970."""

    def __init__(self, key: str, idle: float, longest: float, clock: Callable[[], float]) -> None:
        self._key, self._idle, self._longest, self._clock = key.encode(), idle, longest, clock
        options: dict[str, Any] = {"key_derivation": "hmac", "digest_method": hashlib.sha256}
        self._signer = URLSafeSerializer(key, salt="afluente.session", signer_kwargs=options)
        self._devices = URLSafeSerializer(key, salt="afluente.device", signer_kwargs=options)
        self._ended: dict[str, float] = {}

    # ---- sessions

    def begin(self, user: str | None = None, mark: str = "") -> Session:
        """A new one, with an id that nobody has seen."""
        now = self._clock()
        return Session(secrets.token_urlsafe(18), user, mark, now, now)

    def write(self, session: Session) -> str:
        """The cookie's value."""
        return self._signer.dumps([session.id, session.user, session.mark, int(session.began), int(session.seen)])

    def read(self, cookie: str | None) -> Session | None:
        """The session of a cookie, None if it is not ours, over, or ended."""
        try:
            session = Session(*self._signer.loads(cookie or ""))
        except (BadSignature, TypeError):
            return None
        now = self._clock()
        idle, longest = (self._idle, self._longest) if session.user else (LOGIN_SECONDS, LOGIN_SECONDS)
        alive = now < session.seen + idle and now < session.began + longest and session.id not in self._ended
        return session if alive else None

    def renewed(self, session: Session) -> Session | None:
        """The same, seen now; None while its cookie is new enough."""
        now = self._clock()
        return replace(session, seen=now) if now >= session.seen + RENEW_SECONDS else None

    def end(self, session: Session) -> None:
        """Its cookie counts no more, whoever has a copy."""
        now = self._clock()
        self._ended = {i: over for i, over in self._ended.items() if over > now}
        self._ended[session.id] = session.began + self._longest

    # ---- the token of its forms

    def token(self, session: Session) -> str:
        """What every form of this session carries; no other session has the same."""
        return hmac.new(self._key, f"afluente.csrf\n{session.id}".encode(), hashlib.sha256).hexdigest()

    def is_token(self, session: Session, token: str) -> bool:
        """Whether a form is one of this session."""
        return hmac.compare_digest(self.token(session).encode(), token.encode(errors="replace"))

    # ---- browsers in which somebody has signed in before

    def device(self, user: str) -> str:
        """A cookie that says so."""
        return self._devices.dumps([user, secrets.token_urlsafe(12), int(self._clock())])

    def known_device(self, cookie: str | None, user: str) -> str | None:
        """The name of this browser, if that user has signed in there not too long ago."""
        try:
            owner, device, since = self._devices.loads(cookie or "")
        except (BadSignature, TypeError, ValueError):
            return None
        return device if owner == user and self._clock() < since + DEVICE_SECONDS else None
