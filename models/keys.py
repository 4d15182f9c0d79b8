"""The rule of the idempotency key: which two registrations are one e-mail. Written here and nowhere else.

A key is the SHA-256 of four lines: kind of mail, opp_id, registration, normalised address. It says nothing about
whether an address is valid; `registration.py` does.
"""

import re
from hashlib import sha256

import idna

MAX_ID_DIGITS = 19
"""So many digits always fit 64 bits, so that no JSON parser or writer on the way turns an id into a float."""

_MAX_ID = 10**MAX_ID_DIGITS - 1
_DIGITS = re.compile(r"0|[1-9][0-9]{0,18}")


def canonical_id(value: object) -> int:
    """The one form of an id: 42 and "42" are 42.

    Everything else raises ValueError: signs, leading zeros, blanks, non-ASCII digits, floats, booleans, more than 19
    digits.
    """
    if type(value) is int and 0 <= value <= _MAX_ID:
        return value
    if type(value) is str and _DIGITS.fullmatch(value):
        return int(value)
    raise ValueError("not an integer, or a string of digits without leading zero, of at most 19 digits")


def normalise_address(address: str) -> str:
    """The form in which two spellings of a mailbox compare equal: all lower case, the domain in ASCII (IDNA).

    Only for comparing, never for sending: a server may tell Ana@ from ana@. Raises ValueError when there is no domain,
    when it cannot be written in ASCII, or when the local part is not ASCII.
    """
    local, at, domain = address.rpartition("@")
    if not (at and local and domain and local.isascii()):
        raise ValueError("not an address with an ASCII local part and a domain")
    if domain.isascii():
        return address.lower()
    return f"{local}@{idna.encode(domain, uts46=True).decode()}".lower()


def idempotency_key(mailable: str, opp_id: int | str, registration: int | str, address: str) -> str:
    """64 hex digits, equal for two registrations that are one e-mail of the kind `mailable`. Raises ValueError.

    A change of this rule asks for a new SPLIT_VERSION in the splitter, and makes old rows unfindable: do not.
    """
    return key_of_canonical(mailable, canonical_id(opp_id), canonical_id(registration), normalise_address(address))


def key_of_canonical(mailable: str, opp_id: int, registration: int, address: str) -> str:
    """The same of ids and an ASCII address that are known to be canonical but for upper case; checks nothing."""
    return sha256(f"{mailable}\n{opp_id}\n{registration}\n{address.lower()}".encode()).hexdigest()
