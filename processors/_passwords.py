"""Passwords of the operators' page: hashed by the command line, checked by the page. Argon2id, as RFC 9106 has it."""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argon2 import PasswordHasher

MIN_LENGTH = 12
MAX_BYTES = 1024


@cache
def _hasher() -> "PasswordHasher":
    from argon2 import PasswordHasher  # noqa: PLC0415 - the command line holds this file, whatever it runs

    return PasswordHasher()


class WeakPassword(ValueError):
    """A password that is refused; the text says why."""


def hash_password(password: str) -> str:
    """Its hash, for ADMIN_USERS. Raises WeakPassword."""
    if len(password) < MIN_LENGTH:
        raise WeakPassword(f"a password has at least {MIN_LENGTH} characters")
    if len(password.encode()) > MAX_BYTES:
        raise WeakPassword(f"a password has at most {MAX_BYTES} bytes")
    return _hasher().hash(password)


def is_password(hashed: str, password: str) -> bool:
    """Whether the password has this hash. Takes some 50 ms of a core and 64 MiB, on purpose."""
    from argon2.exceptions import InvalidHashError, VerificationError  # noqa: PLC0415

    try:
        secret = password.encode()
        return len(secret) <= MAX_BYTES and _hasher().verify(hashed, secret)
    except (VerificationError, InvalidHashError, UnicodeEncodeError):
        return False
