"""Every dead letter becomes a message under its id, at least once, whatever happens to the relay."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from streams.dead_letter_tail import DeadLetterTail
from streams.dead_letters import DeadLetter, lay
from streams.errors import Reject, Unconfirmed
from streams.log import StreamSpec
from streams.message import Message, decode
from streams.relay import Relay
from streams.sql import Database
from tests.support.engine import Stage, batch, first, metrics, running

LETTERS = "dead-letters"


@pytest.fixture
async def letters(stage: Stage) -> Stage:
    """A stage with the stream of dead letters."""
    await stage.log.declare(StreamSpec(LETTERS))
    return stage


def relay(stage: Stage, step: Callable[[str], None] = lambda name: None) -> Relay:
    """The relay of dead letters."""
    return Relay(DeadLetterTail(LETTERS), stage.log, stage.engine, stage.limits, metrics(), step)


async def published(stage: Stage) -> list[Message]:
    """What the stream holds."""
    [partition] = await stage.log.partitions(LETTERS)
    end = (await stage.log.bounds(partition)).next
    return [decode(record.data) async for page in stage.log.read(partition, 0, end) for record in page]


async def lay_some(stage: Stage, count: int) -> None:
    """So many dead letters of records."""
    async with Database(stage.engine, 1.0).open() as sql:
        await lay(sql, [DeadLetter("x", "s", 0, "r", "e", offset=n, body=b"%d" % n) for n in range(count)])


async def all_marked(stage: Stage) -> None:
    """Each is marked as published, and none as being published."""
    rows = await stage.dead_letters()
    assert all(row["published_at"] and not row["queued_until"] for row in rows)


async def test_each_failure_is_a_message_with_the_letters_id(letters: Stage) -> None:
    """Of a row, and of a record that never became one."""
    letters.processor.always["a"] = Reject("refused", "as the test wants it")
    async with running(letters.runtime(), relay(letters)):
        await letters.publish(first("a"), b"no message")
        await letters.until(lambda: all_published(letters, 2))
        found = {message.headers["reason"]: message for message in await published(letters)}
        rows = {row["reason"]: row for row in await letters.dead_letters()}
        assert {reason: message.id for reason, message in found.items()} == {
            r: str(row["id"]) for r, row in rows.items()
        }
        assert orjson.loads(found["undecodable"].body)["offset"] == 1
        row = await letters.row("a")
        body = orjson.loads(found["refused"].body)
        assert (body["table"], body["row"], body["key"]) == ("email_dispatches", row["id"], "a")
        assert body["first_at"] <= body["last_at"]


async def all_published(stage: Stage, count: int) -> None:
    """So many are marked."""
    assert len(await stage.dead_letters()) == count
    await all_marked(stage)


async def test_more_letters_than_one_turn_takes_are_all_published_once(letters: Stage) -> None:
    """In the order of their ids."""
    await lay_some(letters, 50)
    async with running(relay(letters)):
        await letters.until(lambda: all_published(letters, 50))
    assert [int(message.id) for message in await published(letters)] == [
        row["id"] for row in await letters.dead_letters()
    ]


class Killed(Exception):
    """As a kill -9, as far as that is possible inside of a process."""


async def test_letter_is_published_twice_and_never_lost_when_the_relay_dies_before_its_mark(letters: Stage) -> None:
    """Two messages of one id; readers drop the second by it."""
    await lay_some(letters, 3)

    def die(name: str) -> None:
        if name == "published":
            raise Killed

    with pytest.raises(Killed):
        await relay(letters, die).run(asyncio.Event())
    assert len(await published(letters)) == 3
    assert all(row["published_at"] is None for row in await letters.dead_letters())
    letters.change(visibility=0.3)
    async with running(relay(letters)):
        await letters.until(lambda: all_published(letters, 3))
    ids = Counter(message.id for message in await published(letters))
    assert set(ids.values()) == {2}
    assert len(ids) == 3


async def test_letter_is_published_once_when_the_relay_dies_before_it_publishes(letters: Stage) -> None:
    """The reservation passes."""
    letters.change(visibility=0.3)
    await lay_some(letters, 1)

    def die(name: str) -> None:
        if name == "reserved":
            raise Killed

    with pytest.raises(Killed):
        await relay(letters, die).run(asyncio.Event())
    async with running(relay(letters)):
        await letters.until(lambda: all_published(letters, 1))
    assert len(await published(letters)) == 1


async def test_letter_is_released_when_it_was_not_confirmed(letters: Stage) -> None:
    """And published as soon as the log takes it, not only after the visibility."""
    letters.change(visibility=300.0)
    await lay_some(letters, 1)
    memory: Any = letters.log
    memory.publish_error = Unconfirmed("away")
    async with running(relay(letters)):

        async def is_released() -> None:
            [row] = await letters.dead_letters()
            assert (row["queued_until"], row["published_at"]) == (None, None)

        await letters.until(is_released)
        memory.publish_error = None
        await letters.until(lambda: all_published(letters, 1))


async def test_two_relays_publish_no_letter_twice(letters: Stage) -> None:
    """What one has reserved the other passes over."""
    await lay_some(letters, 60)
    async with running(relay(letters), relay(letters)):
        await letters.until(lambda: all_published(letters, 60))
    assert set(Counter(message.id for message in await published(letters)).values()) == {1}


async def test_record_that_dies_again_after_a_redrive_names_its_first_letter(letters: Stage) -> None:
    """Its bytes tell: they carry no name. A replay of either record adds nothing."""
    record = batch("reject")

    async def lay_at(offset: int) -> None:
        letter = DeadLetter("splitter", "imports", 0, "rejected", "e", offset=offset, body=record)
        async with Database(letters.engine, 1.0).open() as sql:
            await lay(sql, [letter, letter])

    await lay_at(3)
    await lay_at(4)
    await letters.query("UPDATE dead_letters SET redriven_by = 'ana' WHERE source_offset = 3")
    for offset in (3, 9, 4, 10, 9):
        await lay_at(offset)
    rows = await letters.dead_letters()
    assert [(row["source_offset"], row["redriven_from"]) for row in rows] == [
        (3, None), (4, None), (9, rows[0]["id"]), (10, None)
    ]  # fmt: skip
