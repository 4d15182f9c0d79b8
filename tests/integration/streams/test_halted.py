"""A partition that cannot be read without a jump stands still, until a person says where to go on."""

import asyncio

from tests.support.engine import Stage, first, running

GO_ON = """UPDATE processor_offsets SET next_offset = 3, epoch = epoch + 1, last_timestamp_ms = NULL
    WHERE processor = 'mailer' AND stream = 'recipients' AND partition = 0"""
"""As docs/operating.md has it."""


async def halted(stage: Stage) -> None:
    """Five records, of which retention has dropped the first three unread."""
    await stage.publish(*(first(f"k{n}") for n in range(5)))
    await stage.query(
        """INSERT INTO processor_offsets (processor, stream, partition, next_offset)
        VALUES ('mailer', 'recipients', 0, 1)"""
    )
    [partition] = await stage.log.partitions("recipients")
    stage.log.truncate(partition, 3)  # type: ignore[attr-defined]


async def is_halted(stage: Stage) -> None:
    """The reason is there."""
    position = await stage.position()
    assert position["halted_reason"] == "retention overtook the reader: up to 2 records from 1 on are gone"
    assert position["next_offset"] == 1


async def test_a_partition_stands_still_when_retention_overtook_it(stage: Stage) -> None:
    """Nothing is read, not even what is new: a silent jump would lose people."""
    await halted(stage)
    async with running(stage.runtime()):
        await stage.until(lambda: is_halted(stage))
        await stage.publish(first("new"))
        await stage.until(lambda: looked(stage, end=6))
        assert await stage.count("true") == 0


async def test_a_halted_partition_goes_on_where_a_person_says(stage: Stage) -> None:
    """The running process notices by itself, reads from there, and clears the reason."""
    await halted(stage)
    async with running(stage.runtime()):
        await stage.until(lambda: is_halted(stage))
        await stage.query(GO_ON)
        await stage.all_sent(["k3", "k4"])
        await stage.offset_is(5)
        assert (await stage.position())["halted_reason"] is None


async def test_a_partition_stays_halted_when_only_its_reason_is_wiped_out(stage: Stage) -> None:
    """The offset still lies before what the stream holds: to read on from the end would be the jump."""
    await halted(stage)
    async with running(stage.runtime()):
        await stage.until(lambda: is_halted(stage))
        await stage.query("UPDATE processor_offsets SET halted_reason = NULL")
        await stage.publish(first("new"))
        await stage.until(lambda: looked(stage, end=6))
        await stage.until(lambda: is_halted(stage))
        assert await stage.count("true") == 0


async def looked(stage: Stage, end: int) -> None:
    """The process has seen the new end of the stream."""
    assert (await stage.position())["end_offset"] == end


async def test_a_partition_halts_when_retention_overtakes_it_in_the_middle_of_reading(stage: Stage) -> None:
    """Paused for longer than the stream keeps its records: what is delivered next would be behind a hole."""
    count = 3_000  # more than a subscription holds
    await stage.publish(*(first(f"k{n}") for n in range(count)))
    async with running(stage.runtime()):
        await stage.until(stage.position)
        await stage.query("UPDATE processor_offsets SET paused = true")
        await stage.until(lambda: stands_still(stage))
        at = (await stage.position())["next_offset"]
        [partition] = await stage.log.partitions("recipients")
        stage.log.truncate(partition, count - 1)  # type: ignore[attr-defined]
        await stage.query("UPDATE processor_offsets SET paused = false")

        async def is_halted_in_the_middle() -> None:
            position = await stage.position()
            assert (position["halted_reason"] or "").startswith("retention overtook the reader"), position
            assert at <= position["next_offset"] < count - 1

        await stage.until(is_halted_in_the_middle)
        assert await stage.count("idempotency_key = 'k2999'") == 0


async def stands_still(stage: Stage) -> None:
    """All that was taken is settled."""
    position = await stage.position()
    assert position["paused"]
    assert await stage.count("status = 'pending' AND lease_until IS NOT NULL") == 0
    before = position["next_offset"]
    await asyncio.sleep(0.2)
    assert (await stage.position())["next_offset"] == before


async def test_reading_goes_on_over_a_gap_that_hides_nothing(stage: Stage) -> None:
    """Other clients' entries take offsets too; the position is judged anew, once, and then the gap is passed."""
    await stage.publish(*(first(f"k{n}") for n in range(5)))
    [partition] = await stage.log.partitions("recipients")
    stored = stage.log._stored[partition.name]  # type: ignore[attr-defined]
    stored.records[3:] = [record._replace(offset=record.offset + 2) for record in stored.records[3:]]
    async with running(stage.runtime()):
        await stage.all_sent([f"k{n}" for n in range(5)])
        await stage.offset_is(7)
