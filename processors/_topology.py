"""What must stand at the broker before anything runs: exchange, queues, dead letters, streams; compare and complete it.

Nothing that exists is changed or deleted here, with one exception: the policy that gives the publisher's queue its
dead-letter exchange. Not here: what is printed (`_cli_topology.py`).
"""

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from processors import _queues
from processors._amqp import AmqpRefused, Connection
from processors._management import Management
from processors._queues import Queues
from streams.errors import LogRefused, StreamMissing
from streams.log import Log, StreamSpec

POLICY_SECONDS = 10.0
"""How long a broker may take to say that a new policy is in force."""


class State(StrEnum):
    """How a part of the topology is."""

    OK = "ok"
    MISSING = "missing"
    DIFFERS = "differs"
    UNKNOWN = "unknown"


class Finding(NamedTuple):
    """One part, how it is, and what there is to say of it."""

    what: str
    state: State
    says: str = ""


@dataclass(frozen=True, slots=True)
class Amqp:
    """The publisher's side, and the ways to it."""

    queues: Queues
    connect: Callable[[], Awaitable[Connection]]
    management: Management | None
    vhost: str


def drifted(findings: Iterable[Finding]) -> bool:
    """Whether anything is not as it should be; what cannot be known is no drift."""
    return any(finding.state in {State.MISSING, State.DIFFERS} for finding in findings)


async def look(log: Log, specs: Iterable[StreamSpec], amqp: Amqp | None) -> list[Finding]:
    """Compare everything; changes nothing. `log` is open. Raises LogError and LogRefused, also for AMQP."""
    management = amqp.management if amqp else None
    found = await _look_at_amqp(amqp) if amqp else []
    return found + [finding for spec in specs for finding in await _look_at_stream(log, management, spec)]


async def apply(log: Log, specs: Iterable[StreamSpec], amqp: Amqp | None) -> list[Finding]:
    """Make what is missing, set the policy, and look. Safe to repeat; messages stay where they are."""
    specs = list(specs)
    for spec in specs:
        with suppress(LogRefused):  # exists otherwise: `look` says how
            await log.declare(spec)
    if amqp:
        async with _connected(amqp) as connection:
            await _queues.declare(connection, amqp.queues)
        if amqp.management:
            await _set_policy(amqp.management, amqp.queues)
    return await look(log, specs, amqp)


# ---- AMQP


@asynccontextmanager
async def _connected(amqp: Amqp) -> AsyncIterator[Connection]:
    connection = await amqp.connect()
    try:
        yield connection
    finally:
        await connection.close()


async def _look_at_amqp(amqp: Amqp) -> list[Finding]:
    queues, management = amqp.queues, amqp.management
    async with _connected(amqp) as connection:
        return [
            *[await _look_at_exchange(connection, name) for name in (queues.exchange, queues.dead_exchange)],
            *[await _look_at_queue(connection, queues, name) for name in (queues.queue, queues.dead_queue)],
            await _look_at_bindings(management, queues.exchange, queues.queue, {queues.routing_key}),
            await _look_at_bindings(management, queues.dead_exchange, queues.dead_queue, set(queues.dead_keys)),
            await _look_at_dead_letters(amqp),
        ]


async def _look_at_exchange(connection: Connection, name: str) -> Finding:
    if not await _queues.exchange_exists(connection, name):
        return Finding(f"exchange {name}", State.MISSING)
    return await _judge(f"exchange {name}", _queues.declare_exchange(connection, name))


async def _look_at_queue(connection: Connection, queues: Queues, name: str) -> Finding:
    if not await _queues.queue_exists(connection, name):
        return Finding(f"queue {name}", State.MISSING)
    return await _judge(f"queue {name}", _queues.declare_queue(connection, queues, name))


async def _judge(what: str, declaring: Awaitable[None]) -> Finding:
    """Of what exists, the broker itself says whether it is as it would be declared."""
    try:
        await declaring
    except AmqpRefused as error:
        return Finding(what, State.DIFFERS, str(error))
    return Finding(what, State.OK)


async def _look_at_bindings(management: Management | None, exchange: str, queue: str, keys: set[str]) -> Finding:
    what = f"binding {exchange} -> {queue}"
    if management is None:
        return Finding(what, State.UNKNOWN, "MANAGEMENT_URL is not set")
    lacking = sorted(keys - await management.bindings(exchange, queue))
    return Finding(what, State.MISSING, f"without {', '.join(lacking)}") if lacking else Finding(what, State.OK)


async def _look_at_dead_letters(amqp: Amqp) -> Finding:
    queues, management = amqp.queues, amqp.management
    what = f"dead letters of {queues.queue}"
    if management is None:
        return Finding(what, State.UNKNOWN, f"MANAGEMENT_URL is not set; {command(amqp.vhost, *policy(queues))}")
    info = await management.queue(queues.queue)
    if info is None:
        return Finding(what, State.MISSING, "no queue")
    if _queues.dead_letters_in_force(queues, info):
        return Finding(what, State.OK, f"-> {queues.dead_exchange} -> {queues.dead_queue}")
    if (other := _queues.dead_lettering(info)[0]) not in {None, queues.dead_exchange}:
        says = f"they go to {other} by the queue's arguments or its policy {info.get('policy')!r}, which is left alone"
        return Finding(what, State.DIFFERS, f"{says}; intake puts its own into {queues.dead_queue} itself")
    wanted = policy(queues, await _policy_of(management, info))
    return Finding(what, State.MISSING, command(amqp.vhost, *wanted))


# ---- the policy


def policy(queues: Queues, current: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Name and content of the policy that gives the queue its dead-letter exchange.

    Only one policy is in force on a queue, so this one repeats what the `current` one says, and stands above it.
    """
    name = f"{queues.queue}-dead-letters"
    above = 0 if current is None else current["priority"] + (current["name"] != name)
    definition = {
        **(current["definition"] if current else {}),
        "dead-letter-exchange": queues.dead_exchange,
        "dead-letter-routing-key": queues.dead_queue,
    }
    pattern = f"^{re.escape(queues.queue)}$"
    return name, {"pattern": pattern, "apply-to": "queues", "priority": above, "definition": definition}


def command(vhost: str, name: str, content: dict[str, Any]) -> str:
    """What to type on the broker to set a policy by hand."""
    options = ["-p", vhost, "--apply-to", content["apply-to"], "--priority", str(content["priority"])]
    definition = json.dumps(content["definition"])
    return shlex.join(["rabbitmqctl", "set_policy", *options, name, content["pattern"], definition])


async def _policy_of(management: Management, info: dict[str, Any]) -> dict[str, Any] | None:
    return await management.policy(info["policy"]) if info.get("policy") else None


async def _set_policy(management: Management, queues: Queues) -> None:
    """Set it, unless dead letters go somewhere already; return when it is in force, or after POLICY_SECONDS."""
    info = await management.queue(queues.queue)
    if info is None or _is_settled(queues, info):
        return
    await management.put_policy(*policy(queues, await _policy_of(management, info)))
    with suppress(TimeoutError):
        async with asyncio.timeout(POLICY_SECONDS):
            while not _is_settled(queues, await management.queue(queues.queue) or {}):  # noqa: ASYNC110 - it is theirs
                await asyncio.sleep(0.1)


def _is_settled(queues: Queues, info: dict[str, Any]) -> bool:
    elsewhere = _queues.dead_lettering(info)[0] not in {None, queues.dead_exchange}
    return elsewhere or _queues.dead_letters_in_force(queues, info)


# ---- streams


async def _look_at_stream(log: Log, management: Management | None, spec: StreamSpec) -> list[Finding]:
    what = f"stream {spec.name}"
    try:
        partitions = await log.partitions(spec.name)
    except StreamMissing:
        return [Finding(what, State.MISSING)]
    plain = [partition.name for partition in partitions] == [spec.name]
    if plain != (spec.partitions == 0) or (not plain and len(partitions) != spec.partitions):
        has, wants = (_kind(0 if plain else len(partitions)), _kind(spec.partitions))
        return [Finding(what, State.DIFFERS, f"it is {has}, the settings want {wants}: drain and delete it")]
    if management is None:
        return [Finding(what, State.OK, f"{_kind(spec.partitions)}; retention not looked at")]
    says = [text for p in partitions if (text := _retention(spec, await management.queue(p.name) or {}))]
    return [Finding(what, State.DIFFERS, says[0]) if says else Finding(what, State.OK, _kind(spec.partitions))]


def _kind(partitions: int) -> str:
    return f"a super stream of {partitions} partitions" if partitions else "a plain stream"


def _retention(spec: StreamSpec, info: dict[str, Any]) -> str | None:
    """How the retention of a partition differs from the settings; None if it does not."""
    wanted: dict[str, object] = {
        "x-max-age": f"{spec.max_age_seconds}s",
        "x-max-length-bytes": spec.max_bytes,
        "x-stream-max-segment-size-bytes": spec.segment_bytes,
    }
    given = info.get("arguments") or {}
    differ = [f"{name} is {given.get(name)}, not {value}" for name, value in wanted.items() if given.get(name) != value]
    return f"{info.get('name', spec.name)}: {', '.join(differ)}" if differ else None
