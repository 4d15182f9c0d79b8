"""The envelope: what is written comes back, the client library reads it the same way, bad bytes are named as such."""

import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rstream import AMQPMessage, Properties, amqp_decoder
from rstream._pyamqp.message import Header  # type: ignore[attr-defined]

from streams import amqp
from streams.errors import Undecodable
from streams.message import Message, decode

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
INTEGER = st.integers(-(2**63), 2**63 - 1)
NAME = TEXT.filter(lambda name: name not in ("id", "type", "version", "attempt"))
MESSAGES = st.builds(
    Message,
    id=TEXT,
    type=TEXT,
    version=INTEGER,
    attempt=INTEGER,
    body=st.binary(min_size=1, max_size=400),
    headers=st.dictionaries(NAME, TEXT | INTEGER, max_size=5),
)
SIMPLE = Message("k" * 64, "recipient", 1, 1, b"{}", {"traceparent": "00-ab-cd-01"})


@given(MESSAGES)
def test_every_message_comes_back_equal_when_its_bytes_are_decoded(message: Message) -> None:
    """encode and decode are each other's inverse."""
    assert decode(message.encode()) == message


@given(MESSAGES)
def test_the_client_library_reads_the_same_when_we_encode(message: Message) -> None:
    """rstream's decoder, written by others, sees our properties and our body."""
    read = amqp_decoder(message.encode())
    assert read.body == message.body
    assert {_text(name): _text(value) for name, value in read.application_properties.items()} == {
        "id": message.id,
        "type": message.type,
        "version": message.version,
        "attempt": message.attempt,
        **message.headers,
    }


@given(MESSAGES)
def test_the_same_is_read_when_the_client_library_encodes(message: Message) -> None:
    """What a publisher makes with rstream's AMQPMessage is read as meant."""
    properties = {"id": message.id, "type": message.type, "version": message.version, "attempt": message.attempt}
    theirs = AMQPMessage(body=message.body, application_properties={**properties, **message.headers})
    assert decode(bytes(theirs)) == message


@pytest.mark.parametrize("extra", ["properties", "annotations", "all"])
def test_other_sections_are_passed_over_when_the_client_library_writes_them(extra: str) -> None:
    """Header, annotations, properties and footer of a foreign publisher do not disturb."""
    parts: dict[str, Any] = {}
    if extra in ("properties", "all"):
        parts["properties"] = Properties(
            message_id=b"m-1", content_type=b"application/json", creation_time=1_700_000_000_000
        )
    if extra in ("annotations", "all"):
        parts["message_annotations"] = {b"x-exchange": b"exchange_notification", b"x-list": [1, [2, "three"]]}
        parts["delivery_annotations"] = {b"x-opt": {"nested": {"map": 1}}}
    if extra == "all":
        parts["header"] = Header(durable=True, priority=4, ttl=60_000, first_acquirer=False, delivery_count=0)
        parts["footer"] = {b"x-checksum": 7}
    assert decode(bytes(AMQPMessage(body=b"[]", **parts))) == Message("", "import", 1, 1, b"[]", {})


def test_the_defaults_of_a_plain_publisher_are_taken_when_there_are_no_properties() -> None:
    """A message of any client on the imports stream needs nothing but a body."""
    assert decode(bytes(AMQPMessage(body=b"[]"))) == Message("", "import", 1, 1, b"[]", {})


@pytest.mark.parametrize("value", ["[1]", b"[1]", "[1]" * 100])
def test_the_body_is_read_when_it_is_one_amqp_value(value: str | bytes) -> None:
    """Some clients send a text or binary value instead of a data section."""
    expected = value.encode() if isinstance(value, str) else value
    assert decode(bytes(AMQPMessage(value=value))).body == expected


def test_several_data_sections_are_joined_when_a_client_splits_the_body() -> None:
    """The standard allows more than one."""
    assert (
        decode(b"\x00\x53\x75\xa0\x02[1" + b"\x00\x53\x75\xb0\x00\x00\x00\x02,2" + b"\x00\x53\x75\xa0\x01]").body
        == b"[1,2]"
    )


def test_properties_of_other_types_are_left_out_when_a_client_sends_them() -> None:
    """Booleans, floats, null, times, ids and nested values are no headers of ours."""
    properties = {
        "flag": True,
        "share": 1.5,
        "none": None,
        "who": uuid.UUID(int=1),
        "raw": b"\x00",
        "list": [1],
        "text": "t",
        "n": 7,
    }
    message = decode(bytes(AMQPMessage(body=b"[]", application_properties=properties)))
    assert {name: value for name, value in message.headers.items() if name in ("text", "n")} == {"text": "t", "n": 7}
    assert not {"flag", "share", "none", "who", "list"} & message.headers.keys()


@pytest.mark.parametrize(
    ("name", "value"), [("id", 7), ("type", 7), ("version", "1"), ("attempt", "1"), ("version", True), ("id", None)]
)
def test_a_message_is_undecodable_when_one_of_its_own_properties_has_another_type(name: str, value: object) -> None:
    """Guessing what a version of "1" means would be a second format."""
    with pytest.raises(Undecodable, match=name):
        decode(bytes(AMQPMessage(body=b"[]", application_properties={name: value})))


@pytest.mark.parametrize(
    "data", [b"", b"\x00\x53\x75\xa0\x00", b"\x00\x53\x74\xc1\x01\x00", SIMPLE.encode().replace(b"\x02{}", b"\x00")]
)
def test_a_message_is_undecodable_when_it_has_no_body(data: bytes) -> None:
    """An empty record, an empty data section and properties alone."""
    with pytest.raises(Undecodable, match="no body"):
        decode(data)


@given(st.binary(max_size=200) | st.builds(lambda tail: b"\x00\x53\x74" + tail, st.binary(max_size=60)))
def test_nothing_but_undecodable_is_raised_when_the_bytes_are_arbitrary(data: bytes) -> None:
    """One bad record must never take its reader down."""
    _decode_or_undecodable(data)


@given(MESSAGES, st.data())
def test_nothing_but_undecodable_is_raised_when_a_message_is_damaged(message: Message, data: st.DataObject) -> None:
    """Bytes overwritten, cut out or put in anywhere."""
    damaged = bytearray(message.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged)))
        damaged[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    _decode_or_undecodable(bytes(damaged))


def test_every_cut_is_undecodable_when_a_message_is_truncated() -> None:
    """Half a message is never taken for a whole one."""
    whole = SIMPLE.encode()
    for end in range(len(whole)):
        with pytest.raises(Undecodable):
            decode(whole[:end])


def test_the_short_way_reads_what_the_long_way_reads_when_any_byte_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of our own form are read with what their properties have in common; no byte may make that matter."""
    whole = SIMPLE.encode()
    damaged = [whole[:at] + bytes([new]) + whole[at + 1 :] for at in range(len(whole)) for new in (0, 1, 0xA1, 0xFF)]
    short = [_outcome(data) for data in damaged]
    monkeypatch.setattr(amqp, "split", lambda data, first: None)
    assert short == [_outcome(data) for data in damaged]


def _outcome(data: bytes) -> Message | str:
    try:
        return decode(data)
    except Undecodable as error:
        return str(error)


def test_the_reason_quotes_nothing_when_bytes_are_undecodable() -> None:
    """Reasons go to logs; a message may hold names and addresses."""
    with pytest.raises(Undecodable) as caught:
        decode(b'[{"agent_email": "ana@example.com"}]')
    assert "ana" not in str(caught.value)


@pytest.mark.parametrize(
    "message",
    [
        Message("a", "import", 1, 1, b"", {}),
        Message("a", "import", 1, 1, b"x", {"id": "b"}),
        Message("a", "import", 1, 1, b"x", {"k" * 256: "b"}),
        Message("a", "import", 1, 1, b"x", {"k": "v" * 65_536}),
        Message("a", "import", 2**63, 1, b"x", {}),
        Message("\ud800", "import", 1, 1, b"x", {}),
    ],
    ids=["no body", "own name", "long name", "long text", "large integer", "surrogate"],
)
def test_encoding_is_refused_when_the_message_could_not_be_read_back(message: Message) -> None:
    """The mistake shows where it is made, not at a reader on another machine."""
    with pytest.raises(ValueError, match=r".+"):
        message.encode()


def test_long_texts_come_back_when_they_need_four_bytes_of_length() -> None:
    """An id of 256 bytes and a header of the greatest size."""
    message = Message("i" * 256, "import", 1, 1, b"x", {"k" * 255: "v" * 65_535})
    assert decode(message.encode()) == message


def _decode_or_undecodable(data: bytes) -> None:
    try:
        message = decode(data)
    except Undecodable:
        return
    assert message.body


def _text(value: object) -> object:
    return value.decode() if isinstance(value, bytes) else value
