"""The type system of AMQP 1.0: every code is known, sizes are believed within bounds, and nesting costs no stack."""

import struct

import pytest

from streams import amqp
from streams.errors import Undecodable

BODY = b"\x00\x53\x75\xa0\x02[]"
VALUES = {
    "null": b"\x40",
    "true": b"\x41",
    "false": b"\x42",
    "uint0": b"\x43",
    "ulong0": b"\x44",
    "list0": b"\x45",
    "ubyte": b"\x50\x07",
    "byte": b"\x51\xf9",
    "smalluint": b"\x52\x07",
    "smallulong": b"\x53\x07",
    "smallint": b"\x54\xf9",
    "smalllong": b"\x55\xf9",
    "boolean": b"\x56\x01",
    "ushort": b"\x60\x01\x00",
    "short": b"\x61\xff\x00",
    "uint": b"\x70\xff\xff\xff\xff",
    "int": b"\x71\xff\xff\xff\xff",
    "float": b"\x72" + struct.pack(">f", 1.5),
    "char": b"\x73\x00\x01\xf3\x89",
    "decimal32": b"\x74\x00\x00\x00\x00",
    "ulong": b"\x80" + b"\xff" * 8,
    "long": b"\x81" + b"\xff" * 8,
    "double": b"\x82" + struct.pack(">d", 1.5),
    "timestamp": b"\x83" + b"\x00" * 8,
    "decimal64": b"\x84" + b"\x00" * 8,
    "decimal128": b"\x94" + b"\x00" * 16,
    "uuid": b"\x98" + b"\x00" * 16,
    "vbin8": b"\xa0\x01\x00",
    "str8": b"\xa1\x02\xc3\xa9",
    "sym8": b"\xa3\x01s",
    "vbin32": b"\xb0\x00\x00\x00\x01\x00",
    "str32": b"\xb1\x00\x00\x00\x02\xc3\xa9",
    "sym32": b"\xb3\x00\x00\x00\x01s",
    "list8": b"\xc0\x03\x01\x54\x07",
    "map8": b"\xc1\x05\x02\x54\x07\x54\x08",
    "list32": b"\xd0\x00\x00\x00\x06\x00\x00\x00\x01\x54\x07",
    "map32": b"\xd1\x00\x00\x00\x08\x00\x00\x00\x02\x54\x07\x54\x08",
    "array8": b"\xe0\x04\x02\x54\x07\x08",
    "array32": b"\xf0\x00\x00\x00\x07\x00\x00\x00\x02\x54\x07\x08",
    "described": b"\x00\xa3\x04x:id\xa1\x01v",
    "described twice": b"\x00\x00\x53\x01\x53\x02\xc0\x03\x01\x54\x07",
}
MEANT = {
    "uint0": 0, "ulong0": 0, "ubyte": 7, "byte": -7, "smalluint": 7, "smallulong": 7, "smallint": -7, "smalllong": -7,
    "ushort": 256, "short": -256, "uint": 2**32 - 1, "int": -1, "ulong": 2**64 - 1, "long": -1,
    "str8": "é", "str32": "é", "sym8": "s", "sym32": "s",
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_a_property_has_its_value_or_none_when_its_type_is_any_of_the_standard(name: str) -> None:
    """Texts, symbols and integers are read; everything else is passed over by its size, and what follows is found."""
    properties, body = amqp.read(_properties(b"\xa1\x01k" + VALUES[name] + b"\xa1\x04last\x54\x09") + BODY)
    assert properties == {"k": MEANT.get(name), "last": 9}
    assert body == b"[]"


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_passed_over_to_its_end_when_it_is_of_any_type(name: str) -> None:
    """The end is where the bytes end, and one byte less is one too few."""
    assert amqp.skip(VALUES[name] + b"\x40", 0) == len(VALUES[name])
    with pytest.raises((Undecodable, IndexError, struct.error)):
        amqp.skip(VALUES[name][:-1], 0)


@pytest.mark.parametrize(
    "key",
    [b"\x54\x01", b"\x40", b"\xa0\x01k", b"\x00\x53\x01\xa1\x01k"],
    ids=["integer", "null", "binary", "described"],
)
def test_a_property_is_left_out_when_its_key_is_no_text(key: bytes) -> None:
    """Foreign oddities in headers are no reason to lose a batch."""
    assert amqp.read(_properties(key + b"\x54\x01" + b"\xa1\x01b\x54\x02") + BODY) == ({"b": 2}, b"[]")


@pytest.mark.parametrize(
    "descriptor",
    [b"\x53\x75", b"\x80\x00\x00\x00\x00\x00\x00\x00\x75", b"\xa3\x10amqp:data:binary"],
    ids=["smallulong", "ulong", "symbol"],
)
def test_a_section_is_known_when_its_descriptor_has_any_legal_form(descriptor: bytes) -> None:
    """Number in one byte, number in eight, or name."""
    assert amqp.read(b"\x00" + descriptor + b"\xa0\x02[]") == ({}, b"[]")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[]", "not an AMQP 1.0 message"),
        (b"\x00\xa1\x01x\x40", "described by"),
        (b"\x00\x53\x79\x40", "unknown section"),
        (b"\x00\xa3\x03foo\x40", "unknown section"),
        (b"\x00\x53\x76\x45", "amqp-sequence"),
        (b"\x00\x53\x75\x40", "bytes or text"),
        (b"\x00\x53\x75\xa1\x01x", "bytes or text"),
        (b"\x00\x53\x77\xc0\x01\x00", "bytes or text"),
        (b"\x00\x53\x75\x99", "unknown type code"),
        (b"\x00\x53\x70\x40", "holds a value"),
        (b"\x00\x53\x74\x45", "a map is expected"),
        (b"\x00\x53\x74\xc1\x02\x01\x40", "without value"),
        (b"\x00\x53\x74\xc1\x01\x00" * 2, "two sections"),
        (b"\x00\x53\x74\xc1\x06\x02\xa1\x01k\x40\x40", "longer than"),
        (b"\x00\x53\x74\xc1\x09\x04\xa1\x01k\x40\xa1\x01k\x40", "twice"),
        (b"\x00\x53\x74\xc1\x06\x02\xa1\x01k\xa1\x03" + BODY, "past the end"),
        (b"\x00\x53\x74\xc1\x06\x02\xa1\x01k\xa1\x01\xff", "not UTF-8"),
        (b"\x00\x53\x74\xd1\x00\x00\x00\x04\xff\xff\xff\xfe", "in the middle"),
        (BODY + b"\x00\x53\x77\xa0\x02[]", "more than one kind"),
        (b"\x00\x53\x77\xa0\x02[]" * 2, "more than one kind"),
        (b"\x00\x53\x75\xb0\xff\xff\xff\xff[]", "in the middle"),
        (b"\x00", "in the middle"),
        (b"\x00\x80\x00", "in the middle"),
    ],
)
def test_bytes_are_undecodable_with_their_reason_when_they_break_the_format(data: bytes, reason: str) -> None:
    """The reason goes into the dead letter; a person must be able to act on it."""
    with pytest.raises(Undecodable, match=reason):
        amqp.read(data)


def test_a_million_nested_descriptors_are_refused_when_the_bytes_try_to_exhaust_the_stack() -> None:
    """Values are passed over in a loop."""
    with pytest.raises(Undecodable):
        amqp.read(b"\x00\x53\x77" + b"\x00" * 1_000_000)
    assert amqp.skip(b"\x00" * 1_000 + b"\x40" * 1_001, 0) == 2_001


def _properties(entries: bytes, count: int = 4) -> bytes:
    return b"\x00\x53\x74\xd1" + struct.pack(">II", len(entries) + 4, count) + entries
