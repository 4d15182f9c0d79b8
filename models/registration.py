"""One registration of an import: what the publisher must send, checked before anything is done with it.

Nothing is repaired: a value is taken as it is or refused, because removing one dot may reach another person. What a
refusal says never contains the value: it goes to logs and tables that are no place for names and addresses.
"""

import re
from collections.abc import Mapping
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import orjson
from email_validator import SPECIAL_USE_DOMAIN_NAMES, EmailNotValidError, validate_email

from models.keys import canonical_id, idempotency_key, key_of_canonical

MAILABLE = "import_registration"
"""The kind of mail an import asks for; part of its idempotency key."""

MAX_LENGTH = {"opp_name": 1_000, "number": 255, "agent_name": 300, "agent_email": 254}
"""In characters; generous on purpose, so that only nonsense is refused, and a recipient's message stays small."""

OVERSIZE_KEY = "oversize_item_bytes"
"""The only key of what stands in for an item that was too large to be sent on; its value is the item's size."""

REASONS = {
    "not_an_object": "an item of the list must be an object",
    "too_large": "the item was larger than a message may be and was not sent on",
    "missing": "is required",
    "bad_id": "must be an integer, or a string of digits without leading zero, of at most 19 digits",
    "not_text": "must be a string",
    "blank": "must not be blank",
    "too_long": "is too long",
    "control_character": "must not contain control characters or line breaks",
    "lone_surrogate": "contains half of a UTF-16 pair, which is no character",
    "address_with_blank": "must not contain blanks",
    "address_with_name": "must be the address alone, without name or angle brackets",
    "address_not_one": "must be exactly one address",
    "address_needs_smtputf8": "has a non-ASCII character before the @, which needs SMTPUTF8; that is not supported",
    "address_invalid": "is not a valid address",
}
"""Every reason for which a registration is refused, and its sentence for people."""


class InvalidRegistration(ValueError):
    """A registration cannot be taken: `reason` is a key of REASONS, `field` the field at fault, None for the whole."""

    def __init__(self, reason: str, field: str | None = None) -> None:
        super().__init__(f"{field or 'item'} {REASONS[reason]} ({reason})")
        self.reason = reason
        self.field = field


class Registration(NamedTuple):
    """A registration that can be mailed. `agent_email` is the form for sending: as given, the domain in ASCII."""

    registration: int
    opp_id: int
    opp_name: str
    number: str
    agent_name: str
    agent_email: str

    @property
    def key(self) -> str:
        """The idempotency key of its e-mail."""
        if self.agent_email.isascii():  # always, if it was parsed: then nothing is left to be checked
            return key_of_canonical(MAILABLE, self.opp_id, self.registration, self.agent_email)
        return idempotency_key(MAILABLE, self.opp_id, self.registration, self.agent_email)


def parse_registration(item: object) -> Registration:
    """The registration in one parsed item of an import. Raises `InvalidRegistration`.

    All six keys are required; other keys are ignored, so that the publisher may add some.
    """
    if type(item) is not dict:
        raise InvalidRegistration("not_an_object")
    try:
        registration, opp_id, opp_name, number, agent_name, agent_email = _six_fields(item)
    except KeyError as error:
        raise _missing(item, error) from None
    return _new_registration(
        (
            _id(registration, "registration"),
            _id(opp_id, "opp_id"),
            _text(opp_name, "opp_name"),
            _text(number, "number"),
            _text(agent_name, "agent_name"),
            _address(agent_email),
        )
    )


_six_fields = itemgetter(*Registration._fields)
_new_registration = partial(tuple.__new__, Registration)  # what Registration() does, without a call of Python code


def _missing(item: Mapping[str, object], error: KeyError) -> InvalidRegistration:
    if item.keys() == {OVERSIZE_KEY}:
        return InvalidRegistration("too_large")
    return InvalidRegistration("missing", error.args[0])


def _id(value: object, field: str) -> int:
    try:
        return canonical_id(value)
    except ValueError:
        raise InvalidRegistration("bad_id", field) from None


# ---- text

_FORBIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def _text(value: object, field: str) -> str:
    if type(value) is not str:
        raise InvalidRegistration("not_text", field)
    if not value or value.isspace():
        raise InvalidRegistration("blank", field)
    if len(value) > MAX_LENGTH[field]:
        raise InvalidRegistration("too_long", field)
    if not value.isprintable():  # quick and too strict: no-break spaces and joined emoji are looked at again
        if _FORBIDDEN.search(value):
            raise InvalidRegistration("control_character", field)
        if _SURROGATE.search(value):
            raise InvalidRegistration("lone_surrogate", field)
    return value


# ---- the address

_RESERVED = "|".join(re.escape(name) for name in SPECIAL_USE_DOMAIN_NAMES if name != "test")
_PLAIN_ADDRESS = re.compile(
    r"(?=[^@]{1,64}@[^@]{4,63}\Z)"  # a domain this short has no label above 63 either
    r"[a-z0-9_+-]++(?:\.[a-z0-9_+-]++)*+@"
    rf"(?!(?:.*\.)?(?:{_RESERVED})\Z)"
    r"(?:[a-z0-9]++(?:-[a-z0-9]++)*+\.)+[a-z]{2,}",
    re.ASCII | re.IGNORECASE,  # ASCII also keeps IGNORECASE from taking the Kelvin sign for a k
)


def _address(value: object) -> str:
    if type(value) is str and _PLAIN_ADDRESS.fullmatch(value):
        return value
    return _unusual_address(_text(value, "agent_email"))


def _unusual_address(value: str) -> str:
    """The address for sending when the quick pattern does not know it: the library decides, we name common mistakes.

    Domains under `test` are allowed: they are reserved for what their name says, and reach nobody.
    """
    local, _, domain = value.rpartition("@")
    if reason := _common_mistake(value, local):
        raise InvalidRegistration(reason, "agent_email")
    try:
        parts = validate_email(value, check_deliverability=False, allow_smtputf8=False, test_environment=True)
    except EmailNotValidError:
        raise InvalidRegistration("address_invalid", "agent_email") from None
    address = value if domain.isascii() else f"{local}@{parts.ascii_domain}"
    if len(address) > MAX_LENGTH["agent_email"]:
        raise InvalidRegistration("too_long", "agent_email")
    return address


def _common_mistake(value: str, local: str) -> str | None:
    if "<" in value or ">" in value:
        return "address_with_name"
    if value.count("@") > 1 or "," in value or ";" in value:
        return "address_not_one"
    if any(character.isspace() for character in value):
        return "address_with_blank"
    if not local.isascii():
        return "address_needs_smtputf8"
    return None


# ---- the message to the mailer


def recipient_body(registration: Registration, batch_id: str, index: int) -> bytes:
    """The body of a recipient's message: the six fields, and where in which batch they came from (index from 0)."""
    return orjson.dumps(
        {
            "mailable": MAILABLE,
            "batch": batch_id,
            "index": index,
            "data": {
                "registration": registration.registration,
                "opp_id": registration.opp_id,
                "opp_name": registration.opp_name,
                "number": registration.number,
                "agent_name": registration.agent_name,
                "agent_email": registration.agent_email,
            },
        }
    )
