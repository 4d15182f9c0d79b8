"""The list of an import: strict JSON or a reason, and slices that hold every item once, as the bytes it came in."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.slices import (
    MAX_ITEMS,
    MAX_SLICE_BYTES,
    InvalidImport,
    Slice,
    batch_id,
    cut_items,
    parse_import,
    slice_import,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('{}[],:"\\ab', max_size=4), inner, max_size=3),
    max_leaves=9,
)
BODIES = st.builds(
    lambda items, indent: json.dumps(items, indent=indent).encode(),
    st.lists(ANYTHING, max_size=12),
    st.sampled_from([None, 1]),
)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'[{"agent_email":"ana@example.com","amount":NaN}]', "not_json"),
        (b'[{"agent_email":"ana@example.com","amount":-Infinity}]', "not_json"),
        (b'[{"agent_email":"ana@example.com","amount":1e400}]', "not_json"),
        (b'[{"agent_email":"ana@example.com","amount":-1e400}]', "not_json"),
        (b'\xef\xbb\xbf[{"agent_email":"ana@example.com"}]', "byte_order_mark"),
        ('[{"agent_email":"ana@example.com"}]'.encode("utf-16"), "byte_order_mark"),
        (b'[{"agent_name":"Jos\xe9","agent_email":"jose@example.com"}]', "not_utf8"),
        (b'[{"agent_name":"\\ud800","agent_email":"ana@example.com"}]', "not_json"),
        (b'[{"agent_email":"ana@example.com"}', "not_json"),
        (b'[{"agent_email":"ana@example.com"}] x', "not_json"),
        (b'[{"agent_email":"ana@example.com"},]', "not_json"),
        (b"[01]", "not_json"),
        (b"", "not_json"),
        (b"[" * 100_000 + b"]" * 100_000, "too_deep"),
        (b'[{"a":' * 50_000 + b"1" + b"}]" * 50_000, "too_deep"),
        (b'{"registration": 1}', "not_an_array"),
        (b'"ana@example.com"', "not_an_array"),
        (b"null", "not_an_array"),
    ],
    ids=lambda value: ascii(value[:24]),
)
def test_an_import_is_refused_with_its_reason_when_it_is_no_strict_json_array(body: bytes, reason: str) -> None:
    """Numbers that JSON does not have, byte order marks, Latin-1, bottomless nesting: refused as a whole, at once."""
    with pytest.raises(InvalidImport) as caught:
        parse_import(body)
    assert caught.value.reason == reason
    with pytest.raises(InvalidImport):
        slice_import(body)


def test_the_byte_order_mark_is_named_when_it_is_the_reason() -> None:
    """Whoever exported the file from an office tool can act on it."""
    with pytest.raises(InvalidImport, match=r"byte order mark \(BOM\)"):
        parse_import(b"\xef\xbb\xbf[]")


def test_nothing_of_the_body_is_told_when_it_is_refused() -> None:
    """Neither in the sentence nor in a chained exception, which Sentry would send along."""
    with pytest.raises(InvalidImport) as caught:
        parse_import(b'[{"agent_email":"secreta@example.com",}]')
    assert "secreta" not in str(caught.value)
    assert caught.value.__suppress_context__


@given(st.binary(max_size=60) | st.text('[]{},:"\\ 0e1n', max_size=30).map(str.encode))
def test_nothing_but_a_refusal_is_raised_when_the_bytes_are_arbitrary(body: bytes) -> None:
    """And what is taken can be cut."""
    try:
        items = parse_import(body)
    except InvalidImport:
        return
    assert len(list(cut_items(body))) == len(items)


@given(BODIES)
def test_the_cut_items_are_the_items_when_the_array_is_any_json(body: bytes) -> None:
    """Brackets and commas in texts, nesting, escapes and white space move no border."""
    assert [json.loads(item) for item in cut_items(body)] == json.loads(body)


@given(BODIES, st.integers(24, 200))
def test_every_item_is_in_one_slice_in_order_when_an_import_is_cut(body: bytes, limit: int) -> None:
    """Slices fit the limit, follow one another, and name the same batch and total."""
    slices = list(slice_import(body, limit))
    expected = json.loads(body)
    for one in slices:
        assert len(one.body) <= max(limit, len(b'[{"oversize_item_bytes":100000}]'))
        assert (one.batch, one.total) == (batch_id(body), len(expected))
    assert [one.first for one in slices] == [sum(before.items for before in slices[:at]) for at in range(len(slices))]
    assert sum(one.items for one in slices) == len(expected)
    oversize = dict(pair for one in slices for pair in one.oversize)
    for index, item in enumerate(item for one in slices for item in json.loads(one.body)):
        assert item == ({"oversize_item_bytes": oversize[index]} if index in oversize else expected[index])


def test_a_small_import_is_one_slice_of_the_same_bytes() -> None:
    """So a batch has one name, whether it came through us or straight from a stream client."""
    body = b' [ {"registration" : 1e0 } ] '
    assert list(slice_import(body)) == [Slice(body, batch_id(body), 1, 0, 1)]


def test_an_empty_list_is_one_slice_of_no_items() -> None:
    """Zero is a legal number of registrations: the batch is received and complete."""
    assert list(slice_import(b"[]")) == [Slice(b"[]", batch_id(b"[]"), 0, 0, 0)]
    assert list(cut_items(b" [ \n ] ")) == []


def test_an_item_above_the_limit_is_reported_and_the_others_go_on() -> None:
    """In its place stands a small object, so that the numbers of the others stay true."""
    items: list[Any] = [{"n": number, "text": "x" * 100} for number in range(3)]
    items[1]["text"] = "x" * 2_000_000
    body = orjson.dumps(items)
    (only,) = slice_import(body)
    size = len(orjson.dumps(items[1]))
    assert only.oversize == ((1, size),)
    assert orjson.loads(only.body) == [items[0], {"oversize_item_bytes": size}, items[2]]


def test_numbers_keep_their_form_when_an_import_is_cut() -> None:
    """An integer beyond 64 bits or a decimal with a trailing zero is still the publisher's."""
    body = b'[{"id":123456789012345678901234567890,"x":1.50},' + b'{"pad":"' + b"x" * 100 + b'"}]'
    assert next(slice_import(body, 120)).body == b'[{"id":123456789012345678901234567890,"x":1.50}]'


def test_fifty_thousand_registrations_become_slices_within_the_limit() -> None:
    """A whole call for tenders in one list."""
    item = {"registration": 154069287, "agent_name": "Ana Conceição {,}", "pad": "x" * 150}
    body = orjson.dumps([item] * 50_000)
    slices = list(slice_import(body))
    assert sum(one.items for one in slices) == 50_000
    assert max(len(one.body) for one in slices) <= MAX_SLICE_BYTES
    assert slices[-1].headers() == {"batch": batch_id(body), "total": 50_000, "first": slices[-1].first}


def test_no_slice_holds_more_items_than_a_record_may_when_items_are_tiny() -> None:
    """The splitter would refuse the record otherwise."""
    slices = list(slice_import(b"[" + b"1," * MAX_ITEMS + b"1]"))
    assert [one.items for one in slices] == [MAX_ITEMS, 1]
