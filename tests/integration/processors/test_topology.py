"""`afluente topology` on a real broker, beside a publisher that declares its own part, before and after us."""

import shlex
from typing import Any

import pytest
from typer.testing import Result

from processors._amqp import AmqpRefused
from streams.exit_codes import ExitCode
from streams.testing import eventually
from tests.support.amqp import Stage

LIST = [{"registration": 1}]


async def topology(stage: Stage, command: str, **changes: object) -> Result:
    """Run one of its commands on the stage's names."""
    return await stage.command("topology", command, **changes)


def states(done: Result) -> dict[str, str]:
    """Each part, and how it is."""
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    return {what.partition(":")[0]: state for state, what in lines}


async def undeclare(stage: Stage) -> None:
    """Take away what the publisher has declared."""
    await stage.management.call("DELETE", "queues", "/", stage.queues.queue)
    await stage.management.call("DELETE", "exchanges", "/", stage.queues.exchange)


async def drop_policy(stage: Stage) -> None:
    """And what `apply` makes besides."""
    await stage.management.call("DELETE", "policies", "/", f"{stage.queues.queue}-dead-letters")


async def test_everything_is_made_when_nothing_is_there(stage: Stage) -> None:
    """`plan` changes nothing, `apply` makes it all and may be repeated, and the publisher's declaration still works."""
    try:
        await undeclare(stage)
        plan = await topology(stage, "plan")
        assert (plan.exit_code, set(states(plan).values())) == (ExitCode.OK, {"missing"})
        assert (await topology(stage, "check")).exit_code == ExitCode.DRIFT
        for _ in range(2):
            applied = await topology(stage, "apply")
            assert (applied.exit_code, set(states(applied).values())) == (ExitCode.OK, {"ok"}), applied.stdout
        assert (await topology(stage, "check")).exit_code == ExitCode.OK
        await stage.publisher_declares()
        await stage.publish(LIST)
        assert await stage.ready() == 1
    finally:
        await drop_policy(stage)


async def test_messages_stay_and_both_work_when_the_publisher_came_first(stage: Stage) -> None:
    """A queue that is full keeps its lists; what is bad in it goes to the dead letters by the new policy."""
    try:
        for n in range(100):
            await stage.publish([{"registration": n}])
        await stage.publish(b"{not json")
        assert (await topology(stage, "apply")).exit_code == ExitCode.OK
        assert await stage.ready() == 101
        await stage.publisher_declares()
        await stage.start()
        await stage.settled(100, 1)
        assert sorted(item["registration"] for item in await stage.items()) == list(range(100))
        [letter] = await stage.letters()
        assert (letter.body, letter.headers["x-death"][0]["reason"]) == (b"{not json", "rejected")
    finally:
        await drop_policy(stage)


async def test_policy_in_force_is_kept_and_topped_when_there_is_one(stage: Stage) -> None:
    """Only one policy counts for a queue: ours says what the other said, and the dead-letter exchange."""
    try:
        await stage.put_policy({"max-length": 500_000})
        assert (await topology(stage, "apply")).exit_code == ExitCode.OK
        policy = await stage.management.call("GET", "policies", "/", f"{stage.queues.queue}-dead-letters")
        assert policy["priority"] == 1
        assert policy["definition"] == {
            "max-length": 500_000,
            "dead-letter-exchange": stage.queues.dead_exchange,
            "dead-letter-routing-key": stage.queues.dead_queue,
        }
    finally:
        await drop_policy(stage)


async def test_drift_is_named_and_left_alone_when_somebody_declared_otherwise(stage: Stage) -> None:
    """A quorum queue, dead letters that go elsewhere, another retention, another number of partitions."""
    try:
        assert (await topology(stage, "apply")).exit_code == ExitCode.OK
        await stage.management.call("DELETE", "queues", "/", stage.queues.queue)
        arguments = {"x-queue-type": "quorum", "x-dead-letter-exchange": "elsewhere"}
        body = {"durable": True, "arguments": arguments}
        await stage.management.call("PUT", "queues", "/", stage.queues.queue, body=body)
        done = await topology(stage, "apply", STREAM_MAX_BYTES=1024**3, RECIPIENTS_PARTITIONS=2)
        assert done.exit_code == ExitCode.DRIFT
        found = states(done)
        assert found == {
            f"exchange {stage.queues.exchange}": "ok",
            f"exchange {stage.queues.dead_exchange}": "ok",
            f"queue {stage.queues.queue}": "differs",
            f"queue {stage.queues.dead_queue}": "ok",
            f"binding {stage.queues.exchange} -> {stage.queues.queue}": "ok",
            f"binding {stage.queues.dead_exchange} -> {stage.queues.dead_queue}": "ok",
            f"dead letters of {stage.queues.queue}": "differs",
            **{f"stream {stream}": "differs" for stream in stage.streams.values()},
        }
        assert "inequivalent arg" in done.stdout
        assert "they go to elsewhere" in done.stdout
        assert "x-max-length-bytes is 5368709120, not 1073741824" in done.stdout
        assert "a super stream of 3 partitions, the settings want a super stream of 2 partitions" in done.stdout
    finally:
        await drop_policy(stage)


async def test_line_to_type_is_printed_when_the_management_is_not_known(stage: Stage) -> None:
    """All else is made by AMQP alone; and the line works."""
    try:
        done = await topology(stage, "apply", MANAGEMENT_URL=None)
        assert done.exit_code == ExitCode.OK
        [line] = [line for line in done.stdout.splitlines() if "rabbitmqctl" in line]
        assert line.startswith("unknown")
        command = line[line.index("rabbitmqctl set_policy") :]
        assert f"{stage.queues.queue}-dead-letters" in command
        stage.services.do("ctl", *shlex.split(command)[1:])

        async def is_in_force() -> None:
            assert states(await topology(stage, "check"))[f"dead letters of {stage.queues.queue}"] == "ok"

        await eventually(is_in_force)
    finally:
        await drop_policy(stage)


async def test_streams_are_enough_when_there_is_no_amqp_broker(stage: Stage) -> None:
    """A site without intake has nothing to declare there."""
    done = await topology(stage, "apply", AMQP_URL=None)
    assert done.exit_code == ExitCode.OK
    assert states(done) == {f"stream {stream}": "ok" for stream in stage.streams.values()}


async def test_refusals_end_with_their_code_and_show_no_password(stage: Stage) -> None:
    """Of the broker and of its management."""
    wrong: list[dict[str, Any]] = [
        {"AMQP_URL": f"amqp://nobody:hunter2@127.0.0.1:{stage.services.amqp_port}/"},
        {"MANAGEMENT_URL": f"http://nobody:hunter2@127.0.0.1:{stage.services.management_port}"},
    ]
    for changes in wrong:
        done = await topology(stage, "check", **changes)
        assert done.exit_code == ExitCode.LOG_REFUSED, done
        assert done.stderr.startswith("afluente: ")
        assert "hunter2" not in done.stderr + done.stdout


async def test_publisher_is_refused_when_we_would_declare_with_arguments(stage: Stage) -> None:
    """Why it has to be a policy: the reason for the whole effort, kept as a test."""
    await stage.management.call("DELETE", "queues", "/", stage.queues.queue)
    arguments = {"x-dead-letter-exchange": stage.queues.dead_exchange}
    body = {"durable": True, "arguments": arguments}
    await stage.management.call("PUT", "queues", "/", stage.queues.queue, body=body)
    with pytest.raises(AmqpRefused, match="inequivalent arg 'x-dead-letter-exchange'"):
        await stage.publisher_declares()
