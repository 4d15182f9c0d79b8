"""What the demo ends with: counted from the rows, the mail server's own log and the stream, and compared.

Nothing here is told by the program that it sent or suppressed something; it looks for itself.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from models.tables import BatchDuplicate, DeadLetter, EmailDispatch, ImportBatch
from streams.log import Log, Partition
from streams.message import decode
from streams.testing import NotingOwner, collect


@dataclass(frozen=True, slots=True)
class Result:
    """The last line of the demo.

    `suppressed_on_redelivery`: messages for a recipient that the second delivery brought into the stream, and for which
    the mail server got no mail after it. `mailed_twice`: Message-IDs that it got more than once.
    """

    received: int
    sent: int
    failed: int
    rejected: int
    duplicates_in_batch: int
    suppressed_on_redelivery: int
    mails_at_sink: int
    mailed_twice: int


@dataclass(frozen=True, slots=True)
class Rows:
    """What the database says; `sent_ids` are the Message-IDs of the rows that are sent."""

    received: int
    sent_ids: Sequence[str]
    failed: int
    rejected: int
    duplicates: int


def result(rows: Rows, mails: Sequence[str], mails_before: int, redelivered: Sequence[str]) -> Result:
    """Put together what was found.

    `mails`: the Message-IDs in the order in which the mail server got them, `mails_before` of them before the second
    delivery. `redelivered`: the idempotency keys of the messages that the second delivery brought into the stream.
    """
    mailed_since = {message_id.strip("<>").partition("@")[0] for message_id in mails[mails_before:]}
    return Result(
        received=rows.received,
        sent=len(rows.sent_ids),
        failed=rows.failed,
        rejected=rows.rejected,
        duplicates_in_batch=rows.duplicates,
        suppressed_on_redelivery=sum(key[:32] not in mailed_since for key in redelivered),
        mails_at_sink=len(mails),
        mailed_twice=sum(times > 1 for times in Counter(mails).values()),
    )


def disagreements(found: Result, rows: Rows, mails: Iterable[str], published: int) -> list[str]:
    """Every equation that does not hold, as a sentence; none if all is as promised."""
    r = found
    outcomes = r.sent + r.failed + r.rejected + r.duplicates_in_batch
    at_sink, in_rows = set(mails), set(rows.sent_ids)
    checks = {
        f"{published} were published, but {r.received} received": published == r.received,
        f"{r.received} were received, but sent + failed + rejected + duplicates are {outcomes}": r.received == outcomes,
        f"{r.sent} rows are sent, but the mail server has {r.mails_at_sink} mails": r.sent == r.mails_at_sink,
        f"{len(at_sink - in_rows)} mails arrived whose rows do not say sent": not at_sink - in_rows,
        f"{len(in_rows - at_sink)} rows say sent, but no mail arrived": not in_rows - at_sink,
        f"{r.mailed_twice} mails arrived more than once": not r.mailed_twice,
        f"the second delivery left {r.suppressed_on_redelivery} unmailed, not the {r.sent + r.failed} of the first": (
            r.suppressed_on_redelivery == r.sent + r.failed
        ),
    }
    return [sentence for sentence, holds in checks.items() if not holds]


# ---- looking


def read_sink(log: Path) -> list[str]:
    """The Message-ID of every mail that the mail server wrote down, in order."""
    return [json.loads(line)["message_id"] for line in log.read_text("utf-8").splitlines()]


async def read_rows(engine: AsyncEngine) -> Rows:
    """Count the rows of the only batch in the database."""
    mail, letter = EmailDispatch.__table__.c, DeadLetter.__table__.c  # type: ignore[attr-defined]
    async with engine.connect() as connection:
        sent = await connection.scalars(select(mail.message_id).where(mail.status == "sent"))
        return Rows(
            received=await _count(connection, func.sum(ImportBatch.__table__.c.received)),  # type: ignore[attr-defined]
            sent_ids=list(sent),
            failed=await _count(connection, func.count(), mail.status == "failed"),
            rejected=await _count(connection, func.count(letter.id), letter.row_id.is_(None)),
            duplicates=await _count(connection, func.count(BatchDuplicate.__table__.c.item_index)),  # type: ignore[attr-defined]
        )


async def _count(connection: AsyncConnection, what: object, *where: object) -> int:
    return int(await connection.scalar(select(what).where(*where)) or 0)  # type: ignore[call-overload]


async def read_first_messages(log: Log, since: Sequence[tuple[Partition, int]]) -> list[str]:
    """The keys of the recipients' first messages from these offsets on, read out of the stream itself."""
    keys = []
    for partition, offset in since:
        count = (await log.bounds(partition)).next - offset
        subscription = await log.subscribe(partition, "demo", NotingOwner(offset))
        messages = [decode(record.data) for record in await collect(subscription, count)]
        await subscription.close()
        keys += [message.id for message in messages if message.type == "recipient"]
    return keys
