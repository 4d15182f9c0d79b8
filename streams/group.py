"""What one commit of the recorder holds, and what follows from its result. Nothing here waits or writes."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from streams import recovery
from streams.assignment import Assignment, Entry
from streams.dead_letters import DeadLetter
from streams.lanes import Candidate, Lane
from streams.masking import mask
from streams.offsets import Advance
from streams.processor import Claim, Gate, RowProcessor
from streams.rows import Outcome
from streams.sql import Row


@dataclass(slots=True, eq=False)
class Work:
    """A claim under way, and at its end the outcome (None: the lease was over, nothing is recorded)."""

    assignment: Assignment
    entry: Entry
    claim: Claim
    gate: Gate
    lane: Lane
    outcome: Outcome | None = None
    error: Exception | None = None
    begun: bool = False
    """Its act has run its first line: from then on it says itself how it ended."""
    overdue: bool = False
    """It did not end by its deadline and was cancelled."""
    done: Mapping[str, object] | None = None
    """What the act returned, where that is for `Records.record`."""


@dataclass(slots=True, eq=False)
class Group:
    """What one commit of the recorder holds: whatever gathered while the last one ran."""

    finished: list[Work] = field(default_factory=list)
    refused: list[tuple[Assignment, Candidate]] = field(default_factory=list)
    deferred: list[tuple[Assignment, Candidate, float]] = field(default_factory=list)
    dead: list[tuple[Assignment, Entry, DeadLetter]] = field(default_factory=list)
    claims: list[tuple[Assignment, Candidate]] = field(default_factory=list)
    advances: list[tuple[Assignment, Advance, Entry]] = field(default_factory=list)
    slots: int = 0
    """How many slots are free once this is committed, less the claims that succeed."""
    started: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.finished or self.refused or self.deferred or self.dead or self.claims or self.advances)

    def assignments(self) -> set[Assignment]:
        """Whose records are in this group, claims included."""
        pairs = [*self.refused, *self.claims, *((assignment, c) for assignment, c, _ in self.deferred)]
        letters = [assignment for assignment, _, _ in self.dead]
        return {work.assignment for work in self.finished} | {assignment for assignment, _ in pairs} | set(letters)

    def settle(self, settled: bool = True) -> None:
        """The offset may pass the records of this group, or has to wait for its commit."""
        for entry in self.entries():
            entry.settled = settled

    def entries(self) -> list[Entry]:
        """The records of which this group holds the outcome."""
        refused, dead = [c.entry for _, c in self.refused], [entry for _, entry, _ in self.dead]
        return [work.entry for work in self.finished] + refused + dead + [c.entry for _, c, _ in self.deferred]

    @property
    def done(self) -> list[Work]:
        """Those whose outcome brings further rows with it."""
        return [work for work in self.finished if work.done is not None]

    @property
    def outcomes(self) -> list[Outcome]:
        return [work.outcome for work in self.finished if work.outcome is not None]


class Inbox:
    """What has ended since the recorder's last commit, and the event that wakes it."""

    def __init__(self) -> None:
        self.group = Group()
        self.filled = asyncio.Event()

    def take(self) -> Group:
        """All of it; the inbox is empty then."""
        taken, self.group = self.group, Group()
        self.filled.clear()
        return taken

    def wake(self) -> None:
        """There may be something to commit: an outcome, a record that is settled, a claim that may be made."""
        self.filled.set()

    def finished(self, work: Work) -> None:
        """An act has ended."""
        self.group.finished.append(work)
        self.wake()

    def refused(self, assignment: Assignment, candidate: Candidate) -> None:
        """A row could not be claimed: it says itself what it waits for."""
        self.group.refused.append((assignment, candidate))
        self.wake()

    def dead(self, assignment: Assignment, entry: Entry, letter: DeadLetter) -> None:
        """A record is laid to rest."""
        self.group.dead.append((assignment, entry, letter))
        self.wake()


def letters(group: Group, failed: Sequence[Row], processor: RowProcessor) -> list[DeadLetter]:
    """The dead letters of those rows of the group that are failed for good."""
    where = {w.claim.row_id: (w.assignment, w.entry) for w in group.finished}
    where |= {c.row_id: (a, c.entry) for a, c in group.refused}
    ended = [row for row in failed if row["status"] == "failed"]
    return [_letter(processor, *where[row["id"]], row, reason(group, row)) for row in ended]


def _letter(processor: RowProcessor, assignment: Assignment, entry: Entry, row: Row, why: str) -> DeadLetter:
    return DeadLetter(
        processor.name,
        assignment.partition.stream,
        assignment.partition.index,
        why,
        mask(row["error"] or ""),
        offset=entry.offset,
        message_key=row["row_key"],
        table_name=processor.table.name,
        row_id=row["id"],
        claim_no=row["claim_no"],
        attempts=row["attempts"],
        first_at=row["created_at"],
    )


def reason(group: Group, row: Row) -> str:
    """Why a row has failed, as a code."""
    if row["held"]:
        return recovery.OUTCOME_UNKNOWN
    reasons = {outcome.row_id: outcome.reason for outcome in group.outcomes}
    return reasons.get(row["id"], recovery.ATTEMPTS_USED_UP)


def outcome_word(work: Work, row: Row | None) -> str:
    """How an act ended, for the metrics; `row` is what the commit made of a failure."""
    if work.outcome is None:
        return "dropped"
    if work.outcome.sent:
        return "sent"
    return "failed" if row is not None and row["status"] == "failed" else "retry"
