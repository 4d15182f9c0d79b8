"""The net under all acts, on acts that nobody has let begin yet. What slots do in a turn is shown with the runtime."""

import asyncio
from collections.abc import Mapping
from typing import Any

from streams.assignment import Entry
from streams.group import Inbox
from streams.lanes import Candidate
from streams.processor import Claim, Gate, Limits
from streams.slots import Slots
from streams.telemetry import Metrics


class Endless:
    """Its act ends only when it is ended."""

    name = "endless"

    async def act(self, claim: Claim, gate: Gate) -> Mapping[str, object]:
        await asyncio.Event().wait()
        return {}


async def test_slot_is_not_lost_when_the_deadline_is_over_before_the_act_begins() -> None:
    """As after a stop of the process: timers run first. The act begins, is ended, and says so."""
    processor: Any = Endless()
    assignment: Any = object()
    slots = Slots(processor, Limits(act_timeout=-10), Metrics(), Inbox(), lambda name: None, None)
    slots.free -= 1
    candidate = Candidate(Entry(0, 0), 7, "k", None, "")
    row = {"id": 7, "claim_no": 1, "attempts": 1}
    slots.start_claimed([(assignment, candidate)], [row], 0.0, 1)
    slots._end_overdue()
    async with asyncio.timeout(20):
        await slots.inbox.filled.wait()
    [work] = slots.inbox.take().finished
    assert isinstance(work.error, TimeoutError)
    assert work.outcome is not None
    assert not work.outcome.sent
    slots.cancel()
