"""The buffer between chunks and records, without a broker: every record once, in order, from the position on."""

import zlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from rstream import schema

from streams._rabbitmq_subscription import Buffer
from streams.log import Record


def chunk(first: int, count: int) -> schema.Deliver:
    """A chunk as the broker sends it; the body of a record is its offset."""
    bodies = [b"%d" % offset for offset in range(first, first + count)]
    data = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    return schema.Deliver(
        subscription_id=0,
        magic_version=5,
        chunk_type=0,
        num_entries=count,
        num_records=count,
        timestamp=1000 + first,
        epoch=1,
        chunk_first_offset=first,
        chunk_crc=zlib.crc32(data),
        data_length=len(data),
        trailer_length=0,
        _reserved=0,
        data=data,
    )


def test_nothing_is_kept_while_inactive() -> None:
    """A chunk of a former activation must not be read in the next."""
    buffer = Buffer()

    assert not buffer.add(chunk(0, 3))
    assert not buffer.readable
    assert buffer.take(10) == ([], 0)


def test_records_before_the_position_are_skipped_when_a_chunk_holds_both() -> None:
    """The broker begins with the chunk around the position."""
    buffer = Buffer()
    buffer.start(7)

    assert not buffer.add(chunk(0, 5))
    assert buffer.add(chunk(5, 5))

    assert buffer.take(10) == ([Record(offset, 1005, b"%d" % offset) for offset in (7, 8, 9)], 1)


def test_chunk_counts_as_finished_when_its_last_record_is_taken() -> None:
    """Only then may the broker send another: this is the back-pressure."""
    buffer = Buffer()
    buffer.start(0)
    buffer.add(chunk(0, 4))
    buffer.add(chunk(4, 1))

    assert [buffer.take(limit)[1] for limit in (3, 1, 1, 1)] == [0, 1, 1, 0]


def test_chunk_that_comes_twice_is_read_once() -> None:
    """Offsets only rise, whatever the broker sends."""
    buffer = Buffer()
    buffer.start(0)

    assert buffer.add(chunk(0, 3))
    assert not buffer.add(chunk(0, 3))
    assert buffer.add(chunk(2, 3))

    assert [record.offset for record in buffer.take(10)[0]] == [0, 1, 2, 3, 4]


def test_every_chunk_is_counted_when_delivery_stops() -> None:
    """The one half taken included: each holds a credit that must return."""
    buffer = Buffer()
    buffer.start(0)
    for first in (0, 3, 6):
        buffer.add(chunk(first, 3))
    buffer.take(4)

    assert buffer.stop() == 2
    assert not buffer.readable


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    gaps=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    start=st.integers(0, 60),
    limits=st.lists(st.integers(1, 20), min_size=1, max_size=20),
)
def test_every_record_from_the_position_comes_once_whatever_the_chunks(
    sizes: list[int], gaps: list[int], start: int, limits: list[int]
) -> None:
    """Any sizes, gaps between chunks, position and portions; every chunk's credit returns exactly once."""
    buffer, first, owed = Buffer(), 0, 0
    offsets: list[int] = []
    buffer.start(start)
    for size, gap in zip(sizes, gaps, strict=False):
        owed += not buffer.add(chunk(first, size))
        offsets += range(first, first + size)
        first += size + gap
    taken: list[Record] = []
    for limit in [*limits, 1_000]:
        records, finished = buffer.take(limit)
        assert len(records) <= limit
        taken += records
        owed += finished

    assert [record.offset for record in taken] == [offset for offset in offsets if offset >= start]
    assert all(a.offset < b.offset for a, b in pairwise(taken))
    assert owed == len(sizes)
