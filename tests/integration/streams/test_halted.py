"""A partition that cannot be read without a jump stands still, until a person says where to go on."""

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
