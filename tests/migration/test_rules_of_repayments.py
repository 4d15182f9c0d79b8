"""What the tables of repayments refuse, write down and tell, whoever changes them."""

import asyncio
import json
from datetime import date
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError, IntegrityError, StatementError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlmodel.ext.asyncio.session import AsyncSession

from models.audits import REQUEST_TYPE
from models.tables import Payment, PaymentInstallment, Repayment, RepaymentRequestRow
from processors._migrate import migrate
from streams.database import connect, dialect, driver_connection
from tests.migration.legacy import query
from tests.migration.test_rules_of_rows import time

REQUEST = "INSERT INTO repayment_requests (reference, body) VALUES ('rep-1', '{}')"


@pytest.fixture
async def table(url: str, engine: AsyncEngine) -> AsyncEngine:
    """A migrated database."""
    await migrate(url)
    return engine


def a_payment(reference: str = "ped-1", **changes: object) -> Payment:
    """A payment of an invented customer."""
    values: dict[str, Any] = {
        "reference": reference, "customer": "cus_1", "billing_type": "BOLETO", "value": Decimal("100.10"),
        "due_date": date(2027, 1, 31),
    }  # fmt: skip
    return Payment(**values | changes)


async def save(engine: AsyncEngine, *rows: object) -> None:
    """All in one transaction."""
    async with AsyncSession(engine) as session, session.begin():
        session.add_all(rows)


@pytest.mark.parametrize("value", ["0.01", "100.10", "999999999999.99"])
async def test_money_is_as_it_was_written(table: AsyncEngine, value: str) -> None:
    """A Decimal with two decimals on both databases, where SQLite has none."""
    await save(table, a_payment(value=Decimal(value)))
    async with AsyncSession(table) as session:
        payment = await session.get(Payment, 1)
        assert payment is not None
        assert str(payment.value) == value
    [row] = await query(table, "SELECT CAST(value AS text) AS value FROM payments")
    assert row["value"] == value


async def test_money_is_no_float(table: AsyncEngine) -> None:
    """Refused before the database sees it."""
    with pytest.raises(StatementError, match="is a Decimal and no float"):
        await save(table, a_payment(value=100.1))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [({"value": Decimal("0.00")}, "ck_payments_value"), ({"status": "lost"}, "ck_payments_status")],
)
async def test_payment_is_refused_when_it_makes_no_sense(
    table: AsyncEngine, changes: dict[str, Any], rule: str
) -> None:
    """By the name of the rule."""
    with pytest.raises(IntegrityError, match=rule):
        await save(table, a_payment(**changes))


async def test_one_thing_is_repaid_once(table: AsyncEngine) -> None:
    """Reference, request, new and original payment are there once each, whatever the code does."""
    await save(table, a_payment("old"), a_payment("new"), a_payment("third"))
    await query(table, REQUEST)
    await query(table, REQUEST.replace("rep-1", "rep-2"))
    good: dict[str, Any] = {
        "reference": "a",
        "request_id": 1,
        "payment_id": 2,
        "original_payment_id": 1,
        "requested_by": "ana",
    }
    other: dict[str, Any] = {
        "reference": "b",
        "request_id": 2,
        "payment_id": 3,
        "original_payment_id": None,
        "requested_by": "ana",
    }
    await save(table, Repayment(**good))
    for column in ("reference", "request_id", "payment_id", "original_payment_id"):
        with pytest.raises(IntegrityError):
            await save(table, Repayment(**other | {column: good[column]}))
    await save(table, Repayment(**other))


async def test_installment_belongs_to_a_payment_and_has_its_number_once(table: AsyncEngine) -> None:
    """A part without its whole would be money of nobody."""
    part: dict[str, Any] = {"number": 1, "value": Decimal("50.05"), "due_date": date(2027, 1, 31)}
    with pytest.raises(IntegrityError):
        await save(table, PaymentInstallment(payment_id=9, **part))
    await save(table, a_payment())
    await save(table, PaymentInstallment(payment_id=1, **part))
    with pytest.raises(IntegrityError):
        await save(table, PaymentInstallment(payment_id=1, **part))


# ---- requests


async def test_sent_and_held_requests_refuse_to_become_pending(table: AsyncEngine) -> None:
    """The careless UPDATE of everything is refused by name."""
    await query(table, REQUEST)
    await query(table, f"UPDATE repayment_requests SET status = 'sent', sent_at = {time(table, 0)}")
    with pytest.raises(IntegrityError, match="ck_repayment_requests_pending_never_sent_nor_held"):
        await query(table, "UPDATE repayment_requests SET status = 'pending', attempts = 0")


async def test_changes_of_a_requests_state_are_audited(table: AsyncEngine) -> None:
    """Who failed it and who retried it; that a claimed one is done, the processor audits on the payment."""
    await query(table, REQUEST)
    await query(table, "UPDATE repayment_requests SET attempts = 1, claim_no = 1")
    await query(table, "UPDATE repayment_requests SET status = 'failed', attempts = 3, last_error = 'no'")
    await query(table, "UPDATE repayment_requests SET status = 'pending', attempts = 0")
    await query(table, f"UPDATE repayment_requests SET lease_until = {time(table, 60)}")
    await query(table, f"UPDATE repayment_requests SET status = 'sent', sent_at = {time(table, 0)}, lease_until = NULL")
    failed, retried = await query(table, "SELECT * FROM audits ORDER BY id")
    assert (failed["auditable_type"], failed["auditable_id"]) == (REQUEST_TYPE, 1)
    assert json.loads(str(failed["new_values"])) == {"status": "failed", "attempts": 3, "last_error": "no"}
    assert json.loads(str(retried["new_values"])) == {"status": "pending", "attempts": 0}
    assert retried["tags"] == ("test postgres" if dialect(table) == "postgresql" else "sql")


async def test_request_in_progress_cannot_be_deleted(table: AsyncEngine) -> None:
    """Its charge may just be made."""
    await query(table, REQUEST)
    await query(table, f"UPDATE repayment_requests SET lease_until = {time(table, 60)}")
    with pytest.raises(DBAPIError, match="in progress"):
        await query(table, "DELETE FROM repayment_requests")


async def test_request_that_was_repaid_cannot_be_deleted(table: AsyncEngine) -> None:
    """It is the memory of what its reference has brought about."""
    await save(table, a_payment())
    await query(table, REQUEST)
    await save(table, Repayment(reference="rep-1", request_id=1, payment_id=1, requested_by="ana"))
    with pytest.raises(IntegrityError):
        await query(table, "DELETE FROM repayment_requests")


async def test_relay_is_called_when_a_person_retries_a_request(postgres_url: str) -> None:
    """Not for the engine's own changes."""
    await migrate(postgres_url)
    engine = connect(postgres_url, "test")
    called: asyncio.Queue[object] = asyncio.Queue()

    def hear(connection: object, pid: int, channel: str, payload: object) -> None:
        called.put_nowait(payload)

    try:
        async with driver_connection(engine) as listener:
            await listener.add_listener("afluente_relay", hear)
            await query(engine, REQUEST)
            await query(engine, "UPDATE repayment_requests SET status = 'failed'")
            await query(engine, "UPDATE repayment_requests SET status = 'pending'")
            assert await asyncio.wait_for(called.get(), 10) == "repayment_requests"
            assert called.empty()
            await listener.remove_listener("afluente_relay", hear)
    finally:
        await engine.dispose()


async def test_person_with_psql_sees_and_retries_what_failed(postgres_url: str) -> None:
    """One by its number, many by a part of their error; what is in progress or done is refused by name."""
    await migrate(postgres_url)
    engine = connect(postgres_url, "test")
    try:
        rows = [
            RepaymentRequestRow(reference=f"rep-{n}", body="{}", status="failed", attempts=3, last_error=f"HTTP 50{n}")
            for n in range(3)
        ]
        await save(engine, *rows)
        shown = await query(engine, "SELECT reference FROM failed_repayment_requests ORDER BY id")
        assert [row["reference"] for row in shown] == ["rep-0", "rep-1", "rep-2"]
        await query(engine, "SELECT retry_repayment_request(1)")
        found = await query(engine, "SELECT * FROM retry_repayment_requests(error_like => '%501')")
        assert [(row["row_id"], row["result"]) for row in found] == [(2, "retried")]
        states = await query(engine, "SELECT status, attempts FROM repayment_requests ORDER BY id")
        assert [(row["status"], row["attempts"]) for row in states] == [("pending", 0), ("pending", 0), ("failed", 3)]
        await query(engine, "UPDATE repayment_requests SET lease_until = now() + interval '1 min' WHERE id = 1")
        await query(engine, "UPDATE repayment_requests SET status = 'sent', sent_at = now() WHERE id = 2")
        for number, says in ((1, "is in progress until"), (2, "was sent"), (9, "there is no request 9")):
            with pytest.raises(DBAPIError, match=says):
                await query(engine, f"SELECT retry_repayment_request({number})")
    finally:
        await engine.dispose()
