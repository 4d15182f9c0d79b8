"""`afluente dlq` on a real broker: looking takes nothing away, and what is given back is taken like any list."""

import json

from typer.testing import Result

from processors import _queues
from streams.exit_codes import ExitCode
from tests.support.amqp import Stage

LIST = [{"registration": 1, "agent_name": "Ana Exemplo", "agent_email": "ana@example.com"}]


async def dlq(stage: Stage, *arguments: str) -> Result:
    """Run one of its commands on the stage's names."""
    return await stage.command("dlq", *arguments)


async def bury(stage: Stage, *, lists: int = 0, bad: int = 0) -> None:
    """Have intake bury lists that could not be published, and bodies that are none."""
    await stage.start(AMQP_RETRY_LIMIT=0)
    stage.stream.refusing = True
    for n in range(lists):
        await stage.publish([{**LIST[0], "registration": n}], headers={"tenant": "a"}, message_id=f"m{n}")
    for _ in range(bad):
        await stage.publish(b"{not json")
    await stage.settled(0, lists + bad)
    await stage.stop()
    stage.stream.refusing = False


async def test_letters_are_listed_with_their_reasons_and_nobody_is_named(stage: Stage) -> None:
    """And they are all still there afterwards, in the same order."""
    await bury(stage, lists=2, bad=1)
    before = await stage.letters()
    done = await dlq(stage, "list")
    assert done.exit_code == ExitCode.OK
    assert (done.stdout.count("attempts_used_up"), done.stdout.count("not_json")) == (2, 1)
    assert "Ana" not in done.stdout + done.stderr
    assert [letter.body for letter in await stage.letters()] == [letter.body for letter in before]
    assert (await dlq(stage, "list", "--limit", "1")).stdout.count("attempts_used_up") == 1


async def test_letters_are_there_when_they_were_looked_at_often(stage: Stage) -> None:
    """A quorum queue drops what was given out and back 20 times, unless it was told not to."""
    await bury(stage, lists=2)
    for _ in range(30):
        assert len(await stage.letters()) == 2


async def test_letter_is_shown_with_its_properties_or_its_bytes(stage: Stage) -> None:
    """The bytes are the original ones, to be mended and published again."""
    await bury(stage, lists=2)
    shown = json.loads((await dlq(stage, "show", "2")).stdout)
    assert (shown["message_id"], shown["headers"]["tenant"]) == ("m1", "a")
    assert shown["headers"][_queues.REASON] == "attempts_used_up"
    assert json.loads((await dlq(stage, "show", "2", "--body")).stdout) == [{**LIST[0], "registration": 1}]
    missing = await dlq(stage, "show", "3")
    assert (missing.exit_code, missing.stderr) == (ExitCode.BAD_INPUT, "afluente: there is no letter 3\n")


async def test_letters_are_given_back_and_published_when_the_stream_is_there_again(stage: Stage) -> None:
    """The dry run says how many and does nothing; a limit is kept; what intake could not take stays, and why."""
    await bury(stage, lists=3, bad=2)
    assert (await dlq(stage, "requeue", "--dry-run")).stdout == "3 would be given back\n2 left: not_json\n"
    assert (await stage.ready(), await stage.ready(stage.queues.dead_queue)) == (0, 5)
    assert (await dlq(stage, "requeue", "--limit", "1")).stdout.startswith("1 given back")
    [message] = await stage.messages(stage.queues.queue)
    assert (message.headers, message.properties["message_id"]) == ({"tenant": "a"}, "m0")
    assert (await dlq(stage, "requeue", "--reason", "attempts_used_up")).stdout == "2 given back\n"
    await stage.start()
    await stage.settled(3, 5)
    assert sorted(item["registration"] for item in await stage.items()) == [0, 1, 2]
    assert [letter.body for letter in await stage.letters()] == [b"{not json"] * 2


async def test_reason_is_found_anew_when_the_broker_moved_the_letter(stage: Stage) -> None:
    """The broker only knows that it was rejected; given back it would be rejected again."""
    await stage.start()
    await stage.apply_policy()
    await stage.publish(b"\xef\xbb\xbf[]")
    await stage.settled(0, 1)
    await stage.stop()
    assert "byte_order_mark" in (await dlq(stage, "list")).stdout
    assert (await dlq(stage, "requeue")).stdout == "0 given back\n1 left: byte_order_mark\n"


async def test_item_stays_when_it_is_no_list(stage: Stage) -> None:
    """One registration that is too large cannot be given back as it is: intake would refuse it."""
    await stage.start()
    await stage.publish([{"agent_name": "x" * 1_000_000}])
    await stage.settled(1)
    assert (await dlq(stage, "requeue")).stdout == "0 given back\n1 left: single_item\n"


async def test_letters_stay_when_the_queue_they_came_from_is_gone(stage: Stage) -> None:
    """Nothing is acked that nobody has taken."""
    await bury(stage, lists=1)
    await stage.management.call("DELETE", "queues", "/", stage.queues.queue)
    done = await dlq(stage, "requeue")
    assert done.exit_code == ExitCode.LOG_AWAY
    assert "no queue takes it" in done.stderr
    assert len(await stage.letters()) == 1
