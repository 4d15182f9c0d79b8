"""Headers of any client, whole. pika cuts floating-point numbers to integers and cannot write them; and it dies of NaN
and of a time beyond the year 9999, and the connection with it, whenever that message is delivered: for ever.

RabbitMQ's own types of field are meant: https://www.rabbitmq.com/docs/amqp-0-9-1-errata#section_3
"""

import struct
from typing import Any

from pika import data

_FLOATS = {b"f": ">f", b"d": ">d"}

_decode, _encode = data.decode_value, data.encode_value


def decode_value(encoded: bytes, offset: int) -> tuple[Any, int]:
    """As pika's, but floats are floats, and a time that is no time is its number."""
    kind, start = encoded[offset : offset + 1], offset + 1
    if kind in _FLOATS:
        return struct.unpack_from(_FLOATS[kind], encoded, start)[0], start + struct.calcsize(_FLOATS[kind])
    try:
        return _decode(encoded, offset)  # type: ignore[no-any-return]
    except (ValueError, OverflowError, OSError):
        if kind != b"T":
            raise
        return struct.unpack_from(">q", encoded, start)[0], start + 8


def encode_value(pieces: list[bytes], value: object) -> int:
    """As pika's, and floats too."""
    if isinstance(value, float):
        pieces.append(struct.pack(">cd", b"d", value))
        return 9
    return _encode(pieces, value)  # type: ignore[no-any-return]


def install() -> None:
    """Have pika use these; it looks them up in their module each time."""
    data.decode_value, data.encode_value = decode_value, encode_value
