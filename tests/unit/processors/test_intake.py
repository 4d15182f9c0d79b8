"""What intake decides without a broker: how long to wait, what is dead, which headers a message gets."""

import math
import struct
from datetime import UTC, datetime
from typing import Any

import pytest
from pika import data

from models.slices import InvalidImport
from processors import _amqp_headers, _compose, _queues
from processors._amqp import Delivery
from processors._queues import Queues
from processors._settings import Settings
from processors.intake import Policy, pick_items, read_list
from streams.errors import BadSettings

POLICY = Policy(prefetch=1, retry_waits=(1, 5, 30, 120), retry_limit=4, max_body_bytes=1000)
QUEUES = Queues("notification", "draft", "imports")


def delivery(headers: dict[str, Any] | None = None, **properties: object) -> Delivery:
    """One delivery with these headers."""
    return Delivery(1, b"[]", {**({} if headers is None else {"headers": headers}), **properties})


# ---- retries


def test_each_try_waits_longer_and_the_last_is_final() -> None:
    """Four waits and four times put back: about two and a half minutes in all."""
    assert [POLICY.wait(tries) for tries in range(6)] == [1, 5, 30, 120, None, None]


def test_last_wait_repeats_when_the_limit_is_higher() -> None:
    """A higher limit means more patience, not an error."""
    assert [Policy(1, (1, 5), 4, 1000).wait(tries) for tries in range(5)] == [1, 5, 5, 5, None]


def test_nothing_is_put_back_when_the_limit_is_zero() -> None:
    """Straight to the dead letters, for those who want to decide each time."""
    assert Policy(1, (1,), 0, 1000).wait(0) is None


@pytest.mark.parametrize(
    ("headers", "tries"),
    [
        (None, 0),
        ({}, 0),
        ({"x-retry-count": 2}, 2),
        ({"x-delivery-count": 3}, 3),
        ({"x-retry-count": 2, "x-delivery-count": 3}, 5),
        ({"x-retry-count": "2"}, 0),
        ({"x-retry-count": -7}, 0),
        ({"x-retry-count": None}, 0),
    ],
)
def test_tries_are_counted_by_us_and_by_the_broker(headers: dict[str, Any] | None, tries: int) -> None:
    """What is no count counts nothing: anybody may write headers."""
    assert _queues.tries(delivery(headers).headers) == tries


def test_message_keeps_what_it_had_when_it_is_put_back() -> None:
    """Its count goes up and takes in the broker's, which begins anew; what would divert or refuse it is dropped."""
    headers = {"tenant": "a", "x-delivery-count": 2, "x-acquired-count": 5, "CC": ["elsewhere"], "x-retry-count": 1}
    found = _queues.put_back(delivery(headers, message_id="m", user_id="guest", expiration="60000", delivery_mode=1))
    assert found == {
        "headers": {"tenant": "a", "x-retry-count": 4},
        "message_id": "m",
        "expiration": "60000",
        "delivery_mode": 2,
    }


def test_dead_letter_says_why_and_outlives_its_time() -> None:
    """A time to live would make the letter vanish before anybody has read it."""
    found = _queues.dead(delivery({"tenant": "a"}, expiration="1"), "not_json", "the body is not JSON", index=3)
    headers = found["headers"]
    assert datetime.fromisoformat(headers.pop(_queues.AT)).tzinfo is UTC
    assert headers == {
        "tenant": "a",
        "x-afluente-reason": "not_json",
        "x-afluente-error": "the body is not JSON",
        "x-afluente-index": 3,
    }
    assert "expiration" not in found


def test_nothing_of_its_death_is_left_when_a_letter_is_given_back() -> None:
    """It has all its tries again, and keeps the headers of its publisher."""
    dead = _queues.dead(delivery({"tenant": "a", "x-retry-count": 4}), "attempts_used_up", "away", batch="b", index=1)
    by_broker = {"x-death": [{"count": 1}], "x-first-death-queue": "q", "x-last-death-reason": "rejected"}
    letter = delivery(dead["headers"] | by_broker)
    assert _queues.fresh(letter) == {"headers": {"tenant": "a"}, "delivery_mode": 2}


# ---- where it runs


def test_intake_is_one_of_all_when_it_has_a_broker() -> None:
    """A site without an AMQP broker runs all the others; asked for by name, intake says what it needs."""
    urls: dict[str, Any] = {"database_url": "sqlite+aiosqlite:///a.db", "log_url": "embedded:///log.db"}
    without = Settings(_env_file=None, **urls)
    with_broker = Settings(_env_file=None, **urls, amqp_url="amqp://u:p@mq/")
    assert "intake" not in _compose.all_names(without)
    assert _compose.all_names(with_broker) == ["intake", *_compose.all_names(without)]
    with pytest.raises(BadSettings, match="AMQP_URL is missing"):
        _compose.check(without, ["intake"])
    assert not _compose.uses_database(["intake"])
    assert _compose.uses_database(["intake", "splitter"])


# ---- bodies


def test_body_is_too_large_when_it_is_above_the_limit() -> None:
    """It is not even parsed."""
    assert [piece.total for piece in read_list(b"[" + b" " * 998 + b"]", 1000)] == [0]
    with pytest.raises(InvalidImport) as caught:
        read_list(b"[" + b" " * 999 + b"]", 1000)
    assert caught.value.reason == "too_large"


def test_items_are_picked_as_the_bytes_they_are() -> None:
    """A dead letter holds what was sent, not what we made of it."""
    assert list(pick_items(b'[1, {"a":  1.50} ,"x"]', [1])) == [(1, b'{"a":  1.50}')]
    assert list(pick_items(b"[1]", [])) == []


# ---- the policy of the queue


@pytest.mark.parametrize(
    ("info", "in_force"),
    [
        ({}, False),
        ({"policy_definition": {"max-length": 5}}, False),
        ({"policy_definition": {"dead-letter-exchange": "notification.dlx"}}, False),
        (
            {
                "policy_definition": {
                    "dead-letter-exchange": "notification.dlx",
                    "dead-letter-routing-key": "imports.dlq",
                }
            },
            True,
        ),
        (
            {"arguments": {"x-dead-letter-exchange": "notification.dlx", "x-dead-letter-routing-key": "draft"}},
            True,
        ),
        (
            {
                "arguments": {"x-dead-letter-exchange": "elsewhere"},
                "policy_definition": {
                    "dead-letter-exchange": "notification.dlx",
                    "dead-letter-routing-key": "imports.dlq",
                },
            },
            False,
        ),
    ],
)
def test_rejecting_is_safe_only_when_the_letter_is_certain_to_arrive(info: dict[str, Any], in_force: bool) -> None:
    """A letter without a key of its own keeps that of its publishing, which may lead nowhere; arguments win."""
    assert _queues.dead_letters_in_force(QUEUES, info) is in_force


# ---- headers of other clients


def test_floats_are_whole_when_they_were_read_and_are_written() -> None:
    """pika alone would make 1 of 1.5, and raise on writing a float."""
    _amqp_headers.install()
    pieces: list[bytes] = []
    data.encode_table(pieces, {"ratio": 1.5, "deep": {"list": [0.25, "a"]}})
    assert data.decode_table(b"".join(pieces), 0)[0] == {"ratio": 1.5, "deep": {"list": [0.25, "a"]}}


def test_odd_values_are_read_when_another_client_wrote_them() -> None:
    """Each would end pika's connection whenever that message is delivered, and so stop the queue."""
    assert math.isnan(_amqp_headers.decode_value(b"d" + struct.pack(">d", math.nan), 0)[0])
    assert _amqp_headers.decode_value(b"f" + struct.pack(">f", 0.5), 0) == (0.5, 5)
    assert _amqp_headers.decode_value(b"T" + struct.pack(">Q", 1_700_000_000_000_000), 0) == (1_700_000_000_000_000, 9)
    assert _amqp_headers.decode_value(b"T" + struct.pack(">Q", 0), 0) == (datetime(1970, 1, 1, tzinfo=UTC), 9)
