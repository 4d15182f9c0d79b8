"""A transform as it runs: each record published exactly once, whenever its process dies and whatever is replayed."""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from streams.log import StreamSpec
from streams.message import decode
from streams.testing import MemoryLog, NotingOwner, collect, eventually
from tests.support.engine import STREAM, Numbered, Stage, batch, running

SPLITTER = "splitter"


class Died(BaseException):
    """What a test raises where a process would die."""


@pytest.fixture
async def stage(engine: AsyncEngine) -> Stage:
    """A source with one partition and a target with two."""
    stage = Stage(engine, MemoryLog())
    await stage.declare(2)
    await stage.log.declare(StreamSpec("imports"))
    return stage


async def imports(stage: Stage, *records: str) -> None:
    """Append records of letters to the source."""
    await stage.publish(*(batch(*record.split(",")) for record in records), stream="imports")


async def published(stage: Stage) -> Counter[str]:
    """The ids of all messages in the target, with how often each is there."""
    ids: Counter[str] = Counter()
    for partition in await stage.log.partitions(STREAM):
        count = (await stage.log.bounds(partition)).next
        subscription = await stage.log.subscribe(partition, "looking", NotingOwner())
        ids.update(decode(record.data).id for record in await collect(subscription, count))
        await subscription.close()
    return ids


async def counted(stage: Stage) -> dict[int, int]:
    """How often each record was counted for good."""
    rows = await stage.query("SELECT source_offset, items FROM import_slices")
    return {row["source_offset"]: row["items"] for row in rows}


async def dies(stage: Stage, transform: Numbered, at: str | Callable[[str], None]) -> None:
    """Run until the named step ends the process."""

    def step(name: str) -> None:
        if name == at:
            raise Died

    run = stage.transforming(transform, at if callable(at) else step).run(asyncio.Event())
    with suppress(BaseExceptionGroup):
        await asyncio.wait_for(run, 20)
        pytest.fail("it did not die")
    await stage.log.close()


async def test_each_record_is_published_and_counted_once(stage: Stage) -> None:
    """All its messages, routed, and the offset behind it."""
    await imports(stage, "a,b,c", "d", "e,f")
    async with running(stage.transforming(Numbered())):
        await stage.offset_is(3, processor=SPLITTER)
    assert await published(stage) == Counter("abcdef")
    assert await counted(stage) == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize("step", ["taken", "transformed", "published", "recorded"])
async def test_nothing_is_lost_or_doubled_when_it_dies_between_two_steps(stage: Stage, step: str) -> None:
    """The log drops what it has under the same name; the counts are those of one turn."""
    await imports(stage, "a,b,c", "d,e")
    await dies(stage, Numbered(), step)
    async with running(stage.transforming(Numbered())):
        await stage.offset_is(2, processor=SPLITTER)
    assert await published(stage) == Counter("abcde")
    assert await counted(stage) == {0: 1, 1: 1}


async def test_an_item_that_new_code_accepts_is_not_dropped_as_a_repeat(stage: Stage) -> None:
    """H12: version 1 rejects b, publishes a and c and dies before its commit. b's id is below the highest."""
    await imports(stage, "a,b,c")
    old = Numbered(version=1)
    old.impossible = {"b"}
    await dies(stage, old, "published")
    assert await published(stage) == Counter("ac")
    async with running(stage.transforming(Numbered(version=2))):
        await stage.offset_is(1, processor=SPLITTER)
    ids = await published(stage)
    assert ids["b"] == 1
    assert set(ids) == set("abc")


async def test_a_replay_is_not_swallowed(stage: Stage) -> None:
    """A new epoch is a new name: what a person asks for is published again, while it runs."""
    await imports(stage, "a,b", "c")
    async with running(stage.transforming(Numbered())):
        await stage.offset_is(2, processor=SPLITTER)
        await stage.query("UPDATE processor_offsets SET next_offset = 1, epoch = epoch + 1")
        await eventually(lambda: _published_is(stage, Counter({"a": 1, "b": 1, "c": 2})))
        await stage.offset_is(2, processor=SPLITTER)


async def _published_is(stage: Stage, expected: Counter[str]) -> None:
    total = 0
    for partition in await stage.log.partitions(STREAM):
        total += (await stage.log.bounds(partition)).next
    assert total == expected.total()
    assert await published(stage) == expected


@pytest.mark.parametrize("noticed", ["by its commit", "by its look"])
async def test_counts_of_a_turn_whose_position_was_moved_are_rolled_back(stage: Stage, noticed: str) -> None:
    """Rule 14: a count is no fact of the outside world. Noticed by the commit or by the look, it is counted once."""
    stage.change(idle_look=600.0 if noticed == "by its commit" else 0.02)
    transform, may_go, reached = Numbered(), asyncio.Event(), asyncio.Event()
    await imports(stage, "a", "b")
    runtime = stage.transforming(transform)
    publish = runtime._publish

    async def slow(*arguments: object) -> None:
        reached.set()
        await may_go.wait()
        await publish(*arguments)  # type: ignore[arg-type]

    runtime._publish = slow  # type: ignore[assignment, method-assign]
    stop = asyncio.Event()
    run = asyncio.create_task(runtime.run(stop))
    await reached.wait()
    await stage.query("UPDATE processor_offsets SET epoch = epoch + 1")
    if noticed == "by its look":
        await eventually(lambda: _is_fenced(runtime._assignments[0].fenced))
    else:
        assert not runtime._assignments[0].fenced
    may_go.set()
    await eventually(lambda: _is_fenced(runtime._assignments[0].fenced or runtime._assignments[0].window.next_offset))
    stop.set()
    await run
    async with running(stage.transforming(Numbered())):
        await stage.offset_is(2, processor=SPLITTER)
    assert await counted(stage) == {0: 1, 1: 1}


def _is_fenced(fenced: object) -> None:
    assert fenced


async def test_a_rejected_record_is_a_dead_letter_and_the_others_go_on(stage: Stage) -> None:
    """Whole records: refused by the transform, and bytes that are no message."""
    await imports(stage, "a", "reject", "b")
    await stage.publish(b"\x00\xff", stream="imports")
    async with running(stage.transforming(Numbered())):
        await stage.offset_is(4, processor=SPLITTER)
    assert await published(stage) == Counter("ab")
    letters = {letter["source_offset"]: letter["reason"] for letter in await stage.dead_letters()}
    assert letters == {1: "rejected", 3: "undecodable"}


async def test_a_record_that_kills_its_reader_is_laid_to_rest(stage: Stage) -> None:
    """It ends the process in transform; after starts without progress it is read alone, and then not any more."""
    transform = Numbered()
    transform.kills = Died()
    await imports(stage, "a", "kill", "b")
    deaths = 0
    while not await stage.dead_letters():
        stop = asyncio.Event()
        run = asyncio.create_task(stage.transforming(transform).run(stop))

        async def over(run: "asyncio.Task[None]" = run) -> None:
            assert run.done() or await stage.dead_letters()

        await eventually(over)
        stop.set()
        with suppress(BaseExceptionGroup):
            await run
            continue
        await stage.log.close()
        deaths += 1
        assert deaths < 10
    assert deaths == 4
    async with running(stage.transforming(transform)):
        await stage.offset_is(3, processor=SPLITTER)
    assert await published(stage) == Counter("ab")
    assert [letter["reason"] for letter in await stage.dead_letters()] == ["kills_its_reader"]


async def test_a_paused_transform_publishes_nothing_until_it_is_resumed(stage: Stage) -> None:
    """By SQL, noticed while idle."""
    runtime = stage.transforming(Numbered())
    async with running(runtime):
        await stage.offset_is(0, processor=SPLITTER)
        await stage.query("UPDATE processor_offsets SET paused = true")
        await eventually(lambda: _is_fenced(not runtime._assignments[0].reading))
        await imports(stage, "a")

        async def end_is_seen() -> None:
            assert (await stage.position(processor=SPLITTER))["end_offset"] == 1

        await eventually(end_is_seen)
        assert await published(stage) == Counter()
        await stage.query("UPDATE processor_offsets SET paused = false")
        await stage.offset_is(1, processor=SPLITTER)
    assert await published(stage) == Counter("a")
