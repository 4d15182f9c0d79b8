"""The split of one record: everything in it is outgoing, rejected or a duplicate, and the same again when repeated."""

from collections import Counter
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.registration import MAILABLE, Registration, parse_registration
from models.slices import batch_id, slice_import
from processors.splitter.split import (
    ITEMS_PER_STEP,
    SPLIT_VERSION,
    STRIDE,
    Split,
    publisher_name,
    split,
    split_steps,
)
from streams.errors import Reject
from streams.log import route
from streams.message import Message, decode

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def item(number: object = 1, **other: object) -> dict[str, Any]:
    """A registration as the publisher sends it."""
    return {
        "registration": number,
        "opp_id": 7301,
        "opp_name": "Edital de teste",
        "number": f"on-{number}",
        "agent_name": "Ana Exemplo",
        "agent_email": "ana@example.com",
        **other,
    }


def imported(body: object, **headers: str | int) -> Message:
    """A message on the stream of imports."""
    return Message("", "import", 1, 1, body if isinstance(body, bytes) else orjson.dumps(body), headers)


def recipients(whole: Split) -> dict[int, Message]:
    """All outgoing messages by their index in the import."""
    messages = [decode(data) for partition in whole.outgoing for _, data in partition]
    return {orjson.loads(message.body)["index"]: message for message in messages}


def test_each_registration_becomes_one_message_of_its_own() -> None:
    """Identified by its key, with its place in the batch, on the partition of its key."""
    message = imported([item(1), item(2), item("3")], traceparent=TRACE)
    whole = split(message, 5, 3)
    assert (whole.total, whole.first_index, whole.items, whole.valid) == (3, 0, 3, 3)
    for index, sent in recipients(whole).items():
        registration = parse_registration(item(index + 1))
        assert sent == Message(registration.key, "recipient", 1, 1, sent.body, {"traceparent": TRACE})
        assert orjson.loads(sent.body) == {
            "mailable": MAILABLE,
            "batch": batch_id(message.body),
            "index": index,
            "data": registration._asdict(),
        }
    for partition, outgoing in enumerate(whole.outgoing):
        assert all(route(decode(data).id, 3) == partition for _, data in outgoing)


def test_the_three_bad_items_are_rejected_one_by_one_when_a_thousand_arrive() -> None:
    """The unit of failure is the recipient: 997 go on."""
    items = [item(number) for number in range(1_000)]
    del items[500]["agent_email"]
    items[700]["agent_email"] = None
    items[800]["agent_email"] = {}
    whole = split(imported(items), 0, 3)
    assert whole.valid == 997
    assert [(one.item_index, one.reason) for one in whole.rejected] == [
        (500, "invalid_registration"), (700, "invalid_registration"), (800, "invalid_registration"),
    ]  # fmt: skip
    assert [orjson.loads(one.item) for one in whole.rejected] == [items[500], items[700], items[800]]
    assert all("agent_email" in one.error and "Ana" not in one.error for one in whole.rejected)


def test_a_repeated_key_is_a_duplicate_and_a_repeated_address_is_not_when_they_share_a_record() -> None:
    """The key decides, and the numbers add up."""
    whole = split(imported([item(1), item(2), item(1, agent_email="ANA@example.com")]), 0, 3)
    assert (whole.items, whole.valid, len(whole.rejected)) == (3, 2, 0)
    assert [tuple(one) for one in whole.duplicates] == [(2, parse_registration(item(1)).key)]


def test_only_number_and_digits_share_a_key_when_ids_come_in_odd_forms() -> None:
    """42 and "42" are one, all else is no id; nothing is trimmed."""
    whole = split(imported([item(i) for i in (42, "42", "042", "42 ", "４２", "\u00e9-1", "e\u0301-1", 42.0)]), 0, 1)
    assert list(recipients(whole)) == [0]
    assert [one.item_index for one in whole.duplicates] == [1]
    assert [one.item_index for one in whole.rejected] == [2, 3, 4, 5, 6, 7]


def test_an_integer_beyond_64_bits_is_rejected_with_its_own_digits_when_it_is_an_id() -> None:
    """The dead letter holds what the publisher wrote, not what a parser made of it."""
    large = b'"registration":123456789012345678901234567890,'
    body = orjson.dumps([item(1)]).replace(b'"registration":1,', large)
    whole = split(imported(body), 0, 1)
    assert whole.valid == 0
    assert large in whole.rejected[0].item


def test_an_empty_list_is_a_whole_import_of_nothing() -> None:
    """Complete at once; no reason to refuse it."""
    whole = split(imported([]), 0, 3)
    assert (whole.total, whole.items, whole.valid, whole.outgoing) == (0, 0, 0, [[], [], []])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'[{"amount":NaN}]', "not_json"),
        (b'[{"amount":-Infinity}]', "not_json"),
        (b'[{"amount":1e400}]', "not_json"),
        (b"\xef\xbb\xbf[]", "byte_order_mark"),
        (b'[{"agent_name":"Jos\xe9"}]', "not_utf8"),
        (b'{"registration":1}', "not_an_array"),
        (b"[" + b"1," * STRIDE + b"1]", "too_many_items"),
    ],
    ids=lambda value: ascii(value[:24]),
)
def test_a_record_is_refused_as_a_whole_when_its_body_is_no_import(body: bytes, reason: str) -> None:
    """One dead letter, nothing published."""
    with pytest.raises(Reject) as caught:
        split(imported(body), 0, 3)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("", "recipient", 1, 1, b"[]"), "unknown_type"),
        (Message("", "import", 2, 1, b"[]"), "unknown_version"),
    ],
)
def test_a_record_is_refused_when_its_type_or_version_is_unknown(message: Message, reason: str) -> None:
    """Guessing would publish something that nobody meant."""
    with pytest.raises(Reject) as caught:
        split(message, 0, 3)
    assert caught.value.reason == reason


def test_the_slices_of_an_import_split_like_the_whole_when_it_was_cut() -> None:
    """Same batch, same indexes, same messages; only the publishing ids belong to their records."""
    body = orjson.dumps([item(number) for number in range(100)] + [item("bad"), item(101)])
    whole = split(imported(body), 0, 3)
    parts = [split(imported(one.body, **one.headers()), at, 3) for at, one in enumerate(slice_import(body, 3_000))]
    assert len(parts) > 3
    assert {(part.batch_id, part.total) for part in parts} == {(whole.batch_id, 102)}
    assert {index: sent for part in parts for index, sent in recipients(part).items()} == recipients(whole)
    assert [one for part in parts for one in part.rejected] == whole.rejected


def test_an_item_that_was_too_large_to_send_is_rejected_as_such_and_counted() -> None:
    """The slice holds a small object in its place."""
    body = orjson.dumps([item(1), item(2, agent_name="x" * 2_000_000), item(3)])
    (only,) = slice_import(body)
    whole = split(imported(only.body, **only.headers()), 0, 3)
    assert (whole.valid, [(one.item_index, one.reason) for one in whole.rejected]) == (2, [(1, "too_large")])


GOOD: dict[str, Any] = {"batch": "a" * 64, "total": 9, "first": 3}


@pytest.mark.parametrize(
    "lie",
    [
        {"batch": "A" * 64}, {"batch": "a" * 63}, {"batch": 7}, {"total": "9"}, {"first": "3"}, {"first": -1},
        {"total": 4}, {"first": 8}, {"total": 2**31}, {"batch": None}, {"total": None}, {"first": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_slice_is_refused_when_its_headers_contradict_it(lie: dict[str, Any]) -> None:
    """Wrong types, missing ones and places outside of the import would spoil the numbers of a batch."""
    headers = {name: value for name, value in {**GOOD, **lie}.items() if value is not None}
    with pytest.raises(Reject) as caught:
        split(imported([item(1), item(2)], **headers), 0, 3)
    assert caught.value.reason == "bad_slice"


def test_a_slice_is_taken_when_it_ends_exactly_with_its_import() -> None:
    """The last place is within."""
    assert split(imported([item(1), item(2)], **{**GOOD, "first": 7}), 0, 3).first_index == 7


@pytest.mark.parametrize("trace", ["", "ana@example.com", TRACE + "\n", TRACE.upper(), 7])
def test_a_trace_is_not_passed_on_when_it_is_none(trace: str | int) -> None:
    """Headers of strangers do not reach every recipient's message."""
    assert recipients(split(imported([item(1)], traceparent=trace), 0, 1))[0].headers == {}


def test_publishing_ids_rise_within_and_over_records_when_records_follow_one_another() -> None:
    """The last item of a full record stays below the first of the next, and none is 0."""
    first = split(imported([item(1)]), 0, 1)
    last = split(imported(b"[" + b"1," * (STRIDE - 1) + orjson.dumps(item(2)) + b"]"), 0, 1)
    after = split(imported([item(3)]), 1, 1)
    ids = [whole.outgoing[0][0].publishing_id for whole in (first, last, after)]
    assert ids == [1, STRIDE, STRIDE + 1]
    assert split(imported([item(1)]), 2**40, 1).outgoing[0][0].publishing_id < 2**63


ITEMS = st.lists(st.builds(item, st.integers(0, 6)) | st.sampled_from([{}, None, item("042")]), max_size=12)


@given(ITEMS, st.integers(0, 2**40), st.integers(1, 5))
def test_every_item_is_accounted_for_once_when_a_record_is_split(
    items: list[Any], offset: int, partitions: int
) -> None:
    """Outgoing, rejected and duplicates are all of it; ids rise per partition; a repeat gives the same."""
    whole = split(imported(items), offset, partitions)
    outgoing = list(recipients(whole))
    places = [*outgoing, *(one.item_index for one in whole.rejected), *(one.item_index for one in whole.duplicates)]
    assert Counter(places) == Counter(range(len(items)))
    assert whole.valid + len(whole.rejected) + len(whole.duplicates) == whole.items == len(items)
    assert len({message.id for message in recipients(whole).values()}) == whole.valid
    for partition in whole.outgoing:
        ids = [one.publishing_id for one in partition]
        assert ids == sorted(set(ids))
        for publishing_id, data in partition:
            assert publishing_id == offset * STRIDE + orjson.loads(decode(data).body)["index"] + 1
    assert split(imported(items), offset, partitions) == whole


def test_a_long_record_gives_way_when_it_is_split_in_steps() -> None:
    """Once before the first item, once after each 500, once at the end, when the result is whole."""
    message = imported([item(number) for number in range(3 * ITEMS_PER_STEP)])
    valid_at_steps = [whole.valid for whole in split_steps(message, 0, 3)]
    assert valid_at_steps == [0, ITEMS_PER_STEP, 2 * ITEMS_PER_STEP, 3 * ITEMS_PER_STEP]


def test_the_publishers_name_changes_when_source_partition_or_epoch_does() -> None:
    """Names must never be shared: what one writes would swallow what the other does."""
    names = [publisher_name(*who) for who in (("imports", 0, 0), ("imports", 0, 1), ("imports", 1, 0), ("more", 0, 0))]
    assert len(set(names)) == 4
    assert all(f"v{SPLIT_VERSION}" in name and len(name) < 255 for name in names)


def test_what_a_record_becomes_is_unchanged_unless_the_version_was_raised() -> None:
    """If this fails, raise SPLIT_VERSION together with the expectations below: see its docstring."""
    message = imported([item(154069287, agent_name="Zoë", agent_email="Ana@MÜNCHEN.example"), item("7")])
    whole = split(message, 3, 3)
    assert SPLIT_VERSION == 1
    assert [[one.publishing_id for one in partition] for partition in whole.outgoing] == [[], [196609], [196610]]
    assert recipients(whole)[0].id == "18d90d580a63b576f6b6fb679aac3e3c2716a2aba2c9dfd10798913a929c0857"
    assert recipients(whole)[0].body.endswith(
        b'"index":0,"data":{"registration":154069287,"opp_id":7301,"opp_name":"Edital de teste","number":'
        b'"on-154069287","agent_name":"Zo\xc3\xab","agent_email":"Ana@xn--mnchen-3ya.example"}}'
    )
    assert isinstance(parse_registration(orjson.loads(recipients(whole)[0].body)["data"]), Registration)


@pytest.mark.parametrize(("header", "named"), [(7, 7), (0, None), (-1, None), ("7", None), (None, None)])
def test_split_names_the_dead_letter_when_its_slice_redrives_one(header: Any, named: int | None) -> None:
    """What it publishes is the same in every case: the same people, under the same ids."""
    place: dict[str, str | int] = {"batch": "a" * 64, "total": 9, "first": 4}
    redriven = imported([item()], **place, **({} if header is None else {"redrive": header}))
    assert split(redriven, 3, 1).redriven_from == named
    assert split(redriven, 3, 1).outgoing == split(imported([item()], **place), 3, 1).outgoing
