"""AMQP 1.0 message bytes, as much as an envelope needs: string and integer properties, and one body of bytes.

Reading is total: any bytes give a result or `Undecodable`, every type code of the standard is known, sizes are checked
and nothing recurses. Writing makes application-properties and one data section. Written by hand because the client's
own codec takes several times as long for each recipient and raises whatever it stumbles over; tested against it both
ways.
"""

from struct import Struct
from struct import error as StructError  # noqa: N812 - reads as the class it is

from streams.errors import Undecodable

Scalar = str | int | None
"""A property's value: text or symbol, integer of any width, or None for any other type (left out by the envelope)."""

_U32 = Struct(">I")
_U64 = Struct(">Q")
_TWO_U32 = Struct(">II")

# ---- type codes

_DESCRIBED = 0x00
_WIDTH = {
    **dict.fromkeys((0x40, 0x41, 0x42, 0x43, 0x44, 0x45), 0),  # null, true, false, uint 0, ulong 0, empty list
    **dict.fromkeys((0x50, 0x51, 0x52, 0x53, 0x54, 0x55, 0x56), 1),
    **dict.fromkeys((0x60, 0x61), 2),
    **dict.fromkeys((0x70, 0x71, 0x72, 0x73, 0x74), 4),
    **dict.fromkeys((0x80, 0x81, 0x82, 0x83, 0x84), 8),
    **dict.fromkeys((0x94, 0x98), 16),
}
_SIZE_IN_1_BYTE = frozenset((0xA0, 0xA1, 0xA3, 0xC0, 0xC1, 0xE0))
_SIZE_IN_4_BYTES = frozenset((0xB0, 0xB1, 0xB3, 0xD0, 0xD1, 0xF0))
_TEXT = frozenset((0xA1, 0xA3, 0xB1, 0xB3))
_BINARY = frozenset((0xA0, 0xB0))
_LIST = frozenset((0x45, 0xC0, 0xD0))
_MAP = frozenset((0xC1, 0xD1))
_ZERO = frozenset((0x43, 0x44))
_INTEGER = {
    code: Struct(form).unpack_from
    for code, form in {
        **dict.fromkeys((0x50, 0x52, 0x53), ">B"),
        **dict.fromkeys((0x51, 0x54, 0x55), ">b"),
        0x60: ">H",
        0x61: ">h",
        0x70: ">I",
        0x71: ">i",
        0x80: ">Q",
        0x81: ">q",
    }.items()
}

# ---- sections

_PROPERTIES, _DATA, _SEQUENCE, _VALUE = 0x74, 0x75, 0x76, 0x77
_SKIPPED = {0x70: _LIST, 0x71: _MAP, 0x72: _MAP, 0x73: _LIST, 0x78: _MAP}
_KNOWN = frozenset((_PROPERTIES, _DATA, _VALUE, *_SKIPPED))
_NAMES = {
    b"amqp:header:list": 0x70,
    b"amqp:delivery-annotations:map": 0x71,
    b"amqp:message-annotations:map": 0x72,
    b"amqp:properties:list": 0x73,
    b"amqp:application-properties:map": _PROPERTIES,
    b"amqp:data:binary": _DATA,
    b"amqp:amqp-sequence:list": _SEQUENCE,
    b"amqp:amqp-value:*": _VALUE,
    b"amqp:footer:map": 0x78,
}


def read(data: bytes) -> tuple[dict[str, Scalar], bytes]:
    """Application properties and body (all data sections joined, or an amqp-value of text or bytes).

    Properties under keys that are no text are left out. Raises `Undecodable`, and nothing else, with a reason that
    quotes nothing.
    """
    try:
        return _read(data)
    except (IndexError, StructError):
        raise Undecodable("the message ends in the middle of a value") from None
    except UnicodeDecodeError:
        raise Undecodable("a property's text is not UTF-8") from None


_MAP_HEAD, _DATA_HEAD = b"\x00\x53\x74\xd1", b"\x00\x53\x75\xb0"


def split(data: bytes, first: bytes) -> tuple[str, bytes, int, bytes] | None:
    """Of a message as `write` makes it whose first property has this key and a short text: that text, the bytes of the
    other properties, how many keys and values the map counts, and the body. None for any other message: `read` it.
    """
    at = 12 + len(first)
    if data[:4] != _MAP_HEAD or data[12 : at + 1] != first + b"\xa1" or len(data) < at + 2:
        return None
    size, count = _TWO_U32.unpack_from(data, 4)
    end, rest = 8 + size, at + 2 + data[at + 1]
    body = data[end + 8 :]
    if rest > end or not body or data[end : end + 8] != _DATA_HEAD + _U32.pack(len(body)):
        return None
    try:
        return data[at + 2 : rest].decode(), data[rest:end], count, body
    except UnicodeDecodeError:
        return None


def _read(data: bytes) -> tuple[dict[str, Scalar], bytes]:
    properties: dict[str, Scalar] | None = None
    body: list[bytes] = []
    kind = at = 0
    while at < len(data):
        section, at = _section(data, at)
        stop = skip(data, at)
        if section == _PROPERTIES:
            if properties is not None:
                raise Undecodable("two sections of application-properties")
            properties = _map(data, at, stop)
        elif section in (_DATA, _VALUE):
            if body and (kind == _VALUE or section != kind):
                raise Undecodable("more than one kind of body")
            kind = section
            body.append(_body(data, at, stop, section))
        elif data[at] not in _SKIPPED[section]:
            raise Undecodable(f"section {section:#x} holds a value of type {data[at]:#x}")
        at = stop
    return properties or {}, body[0] if len(body) == 1 else b"".join(body)


def _section(data: bytes, at: int) -> tuple[int, int]:
    """The section that begins at `at`, and the position of its value."""
    if data[at] != _DESCRIBED:
        raise Undecodable("not an AMQP 1.0 message: no section where one must begin")
    code = data[at + 1]
    if code == 0x53:
        section, value_at = data[at + 2], at + 3
    elif code == 0x80:
        section, value_at = _U64.unpack_from(data, at + 2)[0], at + 10
    elif code == 0xA3:
        value_at = at + 3 + data[at + 2]
        section = _NAMES.get(data[at + 3 : value_at], 0)
    else:
        raise Undecodable(f"a section is described by a value of type {code:#x}")
    if section not in _KNOWN:
        raise Undecodable("the body is an amqp-sequence" if section == _SEQUENCE else "unknown section")
    return section, value_at


def skip(data: bytes, at: int) -> int:
    """The position after the value that begins at `at`, of any type: by its size, in a loop, without unpacking."""
    wanted = 1
    while wanted:
        wanted -= 1
        code = data[at]
        if code in _SIZE_IN_1_BYTE:
            at += 2 + data[at + 1]
        elif code in _SIZE_IN_4_BYTES:
            at += 5 + int(_U32.unpack_from(data, at + 1)[0])
        elif code in _WIDTH:
            at += 1 + _WIDTH[code]
        elif code == _DESCRIBED:
            at += 1
            wanted += 2  # its descriptor and its value, each of which may be described again
        else:
            raise Undecodable(f"unknown type code {code:#x}")
    if at > len(data):
        raise Undecodable("the message ends in the middle of a value")
    return at


def _body(data: bytes, at: int, stop: int, section: int) -> bytes:
    code = data[at]
    if code in _BINARY or (section == _VALUE and code in _TEXT):
        return data[at + (2 if code in _SIZE_IN_1_BYTE else 5) : stop]
    raise Undecodable(f"the body is a value of type {code:#x}; bytes or text are expected")


def _map(data: bytes, at: int, stop: int) -> dict[str, Scalar]:
    code = data[at]
    if code == 0xD1:
        count, at = _U32.unpack_from(data, at + 5)[0], at + 9
    elif code == 0xC1:
        count, at = data[at + 2], at + 3
    else:
        raise Undecodable(f"application-properties are a value of type {code:#x}; a map is expected")
    if count % 2:
        raise Undecodable("a key without value in application-properties")
    found: dict[str, Scalar] = {}
    for _ in range(count // 2):
        if data[at] == 0xA1:  # as _scalar does; a call less for each of our own keys
            name_at, at = at + 2, at + 2 + data[at + 1]
            key: Scalar = data[name_at:at].decode()
        else:
            key, at = _scalar(data, at, stop)
        value, at = _scalar(data, at, stop)
        if key in found:
            raise Undecodable("the same application property twice")
        if type(key) is str:
            found[key] = value
    if at != stop:
        raise Undecodable("application-properties are longer than their entries")
    return found


def _scalar(data: bytes, at: int, end: int) -> tuple[Scalar, int]:
    """The value at `at` and the position after it, which is not past `end`."""
    code = data[at]
    value: Scalar = None
    if code == 0xA1:
        stop = at + 2 + data[at + 1]
        value = data[at + 2 : stop].decode()
    elif code in _INTEGER:
        value = _INTEGER[code](data, at + 1)[0]
        stop = at + 1 + _WIDTH[code]
    else:
        stop = skip(data, at)
        if code in _TEXT:
            value = data[at + (2 if code == 0xA3 else 5) : stop].decode()
        elif code in _ZERO:
            value = 0
    if stop > end:
        raise Undecodable("a property reaches past the end of its section")
    return value, stop


# ---- writing

MAX_KEY_BYTES = 255
MAX_VALUE_BYTES = 65_535
_BIG_INTEGER = Struct(">Bq")
_INT = Struct(">Bi")


def text(value: str) -> bytes:
    """A string with its type code. ValueError above 65,535 bytes, or when it cannot be written in UTF-8."""
    encoded = value.encode()
    size = len(encoded)
    if size <= 255:
        return b"\xa1" + size.to_bytes() + encoded
    if size > MAX_VALUE_BYTES:
        raise ValueError(f"a property's text of {size} bytes; {MAX_VALUE_BYTES} are allowed")
    return b"\xb1" + _U32.pack(size) + encoded


def key(name: str) -> bytes:
    """The name of a property with its type code. ValueError above 255 bytes."""
    encoded = text(name)
    if encoded[0] != 0xA1:
        raise ValueError(f"a property's name of more than {MAX_KEY_BYTES} bytes")
    return encoded


def integer(value: int) -> bytes:
    """An integer in its shortest signed form. ValueError beyond 64 bits."""
    if -128 <= value <= 127:
        return b"\x54" + value.to_bytes(1, signed=True)
    if -(2**31) <= value < 2**31:
        return _INT.pack(0x71, value)
    if -(2**63) <= value < 2**63:
        return _BIG_INTEGER.pack(0x81, value)
    raise ValueError("an integer of more than 64 bits")


def write(properties: bytes, count: int, body: bytes) -> bytes:
    """A whole message of `count` properties, keys and values encoded one after the other, and one data section."""
    head = _MAP_HEAD + _TWO_U32.pack(len(properties) + 4, 2 * count)
    return b"".join((head, properties, _DATA_HEAD, _U32.pack(len(body)), body))
