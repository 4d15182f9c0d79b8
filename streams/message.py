"""The envelope: what every message says about itself, and its bytes on a log.

Any AMQP 1.0 stream client can read it: four application properties (`id`, `type`, `version`, `attempt`), perhaps more,
and one data section. What the body means is its reader's business. A record's offset is no part of it: see
`log.Record`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from struct import error as StructError  # noqa: N812 - reads as the class it is

from streams import amqp
from streams.errors import Undecodable

DEFAULT_TYPE = "import"
"""The type of a message without properties: only publishers of import lists are not asked to write any."""

_OWN = ("id", "type", "version", "attempt")
_ID = amqp.key("id")
_MAX_COMMON = 1024
"""Bytes of properties that are kept to know them again; longer ones are read each time."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message, decoded. `headers` are all properties but the four of its own; text and integers only."""

    id: str
    type: str
    version: int
    attempt: int
    body: bytes
    headers: Mapping[str, str | int] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The bytes for a log.

        Raises ValueError for an empty body (brokers close the connection of an AMQP 0-9-1 reader over it), names above
        255 bytes, texts above 65,535 bytes, integers beyond 64 bits and headers that take one of the four names.
        """
        return encoder(self.type, self.version, self.attempt, self.headers)(self.id, self.body)


def encoder(type_: str, version: int, attempt: int, headers: Mapping[str, str | int]) -> Callable[[str, bytes], bytes]:
    """For many messages that differ in id and body alone: encodes these two, the rest is encoded once.

    It raises what `Message.encode` raises.
    """
    fixed = b"".join([_fixed(type_, version, attempt), *(_header(name, value) for name, value in headers.items())])
    count, text, write = 4 + len(headers), amqp.text, amqp.write

    def encode(message_id: str, body: bytes) -> bytes:
        if not body:
            raise ValueError("a message needs a body")
        return write(_ID + text(message_id) + fixed, count, body)

    return encode


@lru_cache(maxsize=256)
def _fixed(type_: str, version: int, attempt: int) -> bytes:
    """The properties that are the same for thousands of messages, encoded once."""
    return b"".join(
        (
            amqp.key("type") + amqp.text(type_),
            amqp.key("version") + amqp.integer(version),
            amqp.key("attempt") + amqp.integer(attempt),
        )
    )


@lru_cache(maxsize=256, typed=True)
def _header(name: str, value: str | int) -> bytes:
    if name in _OWN:
        raise ValueError(f"a header may not be called {name}")
    return amqp.key(name) + (amqp.text(value) if isinstance(value, str) else amqp.integer(value))


def decode(data: bytes) -> Message:
    """The message in these bytes. Raises `Undecodable`, and nothing else; its reason quotes nothing of the message.

    Properties that are missing take the values of a publisher that knows none: id "", type "import", version 1,
    attempt 1. Properties of other types than text and integers (also booleans and times) are left out.
    """
    if (parts := amqp.split(data, _ID)) is not None:
        message_id, rest, count, body = parts
        if len(rest) <= _MAX_COMMON and (known := _common(rest, count)) is not None:
            return Message(message_id, known.type, known.version, known.attempt, body, known.headers)
    return _decode(*amqp.read(data))


@lru_cache(maxsize=256)
def _common(rest: bytes, count: int) -> Message | None:
    """What the messages of a whole import have in common, read once: all properties but the id. None: read each."""
    try:
        properties, body = amqp.read(amqp.write(rest, count // 2 - 1, b"-"))
        return None if count % 2 or "id" in properties else _decode(properties, body)
    except (Undecodable, StructError):
        return None


def _decode(properties: dict[str, amqp.Scalar], body: bytes) -> Message:
    if not body:
        raise Undecodable("the message has no body")
    message_id = properties.pop("id", "")
    type_ = properties.pop("type", DEFAULT_TYPE)
    version = properties.pop("version", 1)
    attempt = properties.pop("attempt", 1)
    if not (type(message_id) is str and type(type_) is str):
        raise Undecodable("the properties id and type must be text")
    if not (type(version) is int and type(attempt) is int):
        raise Undecodable("the properties version and attempt must be integers")
    headers = {name: value for name, value in properties.items() if value is not None}
    return Message(message_id, type_, version, attempt, body, headers)
