"""Frames that are written and read by hand, beside the client library's own."""

from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
from rstream import schema
from rstream.encoding import decode_frame, encode_frame, encode_publish

from streams._rabbitmq_connection import _read_quickly
from streams._rabbitmq_publisher import PUBLISHER_ID, SLICE_BYTES, SLICE_MESSAGES, _frames

CHUNK = b"\x00\x00\x00\x01a\x00\x00\x00\x02bc"


def test_frames_are_those_of_the_client_library_when_messages_are_published() -> None:
    """Byte for byte, with ids and sizes at their limits."""
    messages = [(0, b""), (1, b"a" * 300), (2**63 - 1, bytes(range(256)))]
    [frame] = _frames(messages)
    parts = [schema.Message(number, None, data) for number, data in messages]
    assert frame == encode_publish(schema.Publish(PUBLISHER_ID, parts))


def test_frames_are_cut_at_both_limits_when_there_is_much_to_publish() -> None:
    """By number of messages and by bytes; a message larger than a frame's share goes alone."""
    many = [(n, b"x") for n in range(2 * SLICE_MESSAGES + 1)]
    assert [_count(frame) for frame in _frames(many)] == [SLICE_MESSAGES, SLICE_MESSAGES, 1]
    large = [(1, b"x"), (2, b"x" * SLICE_BYTES), (3, b"x"), (4, b"x")]
    assert [_count(frame) for frame in _frames(large)] == [1, 1, 2]
    assert list(_frames([])) == []


@pytest.mark.parametrize(
    "frame",
    [
        schema.PublishConfirm(7, [1, 2**63, 2**64 - 1]),
        schema.PublishConfirm(0, []),
        schema.Heartbeat(),
        schema.PublishError(1, [schema.PublishingError(5, 18)]),
        schema.Deliver(0, 80, 0, 2, 2, 1_700_000_000_000, 3, 2**40, crc32(CHUNK), len(CHUNK), 9, 7, CHUNK),
        schema.Deliver(255, -1, 0, 0, 0, -1, 0, 0, 0, 0, 0, 0, b""),
    ],
)
async def test_frames_are_read_as_the_client_library_reads_them(frame: schema.Frame) -> None:
    """Confirms and chunks by the short way, all others by its own."""
    assert await _reader(encode_frame(frame)[4:]).read_frame() == frame


async def test_a_confirm_with_bytes_behind_it_ends_the_reader_as_before() -> None:
    """Whatever is not exactly a confirm is the client library's to judge."""
    with pytest.raises(ValueError, match="Could not decode"):
        await _reader(encode_frame(schema.PublishConfirm(0, [1, 2]))[4:] + b"x").read_frame()


async def test_a_chunk_that_is_damaged_ends_the_reader_as_before() -> None:
    """Its checksum is looked at on the short way, too."""
    chunk = schema.Deliver(0, 80, 0, 2, 2, 1, 3, 4, crc32(CHUNK), len(CHUNK), 0, 0, CHUNK)
    with pytest.raises(ValueError, match="checksum"):
        await _reader(encode_frame(chunk)[4:-1] + b"?").read_frame()


def _reader(data: bytes) -> Any:
    async def raw() -> bytearray:
        return bytearray(data)

    connection = SimpleNamespace(_read_frame_raw=raw)
    _read_quickly(SimpleNamespace(_conn=connection))  # type: ignore[arg-type]
    return connection


def _count(frame: bytes) -> int:
    decoded = decode_frame(frame[4:])
    assert isinstance(decoded, schema.Publish)
    return len(decoded.messages)
