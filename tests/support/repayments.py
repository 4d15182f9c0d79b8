"""Repayments in the test's own process: processor, relay and sync as `_compose.py` builds them, and ways to look."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

from models.repayment_requests import RepaymentRequest, even_installments
from processors import _compose, _replay
from processors._demo.sink import Sink
from processors._repayment_request import publish_request
from processors.repayments.validation import today
from streams.testing import eventually
from tests.support.asaas import CUSTOMER, TOKEN, Asaas
from tests.support.job import Job
from tests.support.receiver import Receiver
from tests.support.sites import Site

PROCESSORS = ("outbox_relay", "repayments", "sync")
PARTNER_TOKEN = "invented-partner-token"
SHORT = {"ASAAS_TIMEOUT_SECONDS": "2", "OUTBOX_RETRY_SECONDS": "0.2", "OUTBOX_TIMEOUT_SECONDS": "2"}
WRITTEN = ("payments", "installments", "repayments", "outbox_events")
"""The tables into which a repayment writes; audits besides."""


def due(days: int = 10) -> date:
    """A day that is not over yet."""
    return today() + timedelta(days=days)


def a_request(reference: str = "rep-1", parts: int = 0, value: str = "100.00", **changes: Any) -> RepaymentRequest:
    """A good one, of an invented customer, unless changes make it a bad one."""
    fields: dict[str, Any] = {
        "reference": reference,
        "customer": CUSTOMER,
        "billing_type": "BOLETO",
        "value": value,
        "due_date": due(),
        "requested_by": "ana",
    }
    if parts:
        split = even_installments(Decimal(value), parts, due())
        fields["installments"] = [part.model_dump() for part in split]
    return RepaymentRequest.parse(fields | changes)


class Repaying(Job):
    """See `Job`. Outside are the gateway and the partner."""

    def __init__(self, site: Site, asaas: Asaas, partner: Receiver | None = None, **changes: Any) -> None:
        processors = changes.pop("processors", PROCESSORS)
        ours = {"ASAAS_API_URL": asaas.url, "ASAAS_API_TOKEN": TOKEN, **SHORT}
        if partner is not None:
            ours |= {"NEW_CHECKOUT_API_URL": partner.url, "NEW_CHECKOUT_API_TOKEN": PARTNER_TOKEN}
        self.asaas = asaas
        super().__init__(site, Sink(), processors=processors, **{**ours, **changes})

    # ---- writing

    async def ask(self, *requests: RepaymentRequest, traceparent: str | None = None) -> None:
        """Publish requests as the command and the page do."""
        await asyncio.gather(*(publish_request(self.log, self.settings, each, traceparent) for each in requests))

    async def payment(self, charges: Sequence[str] = (), **changes: Any) -> int:
        """A payment of the tables; with one charge it is that one, with several each is a part of it."""
        values = {
            "reference": "old",
            "customer": CUSTOMER,
            "billing_type": "BOLETO",
            "value": "100.00",
            "status": "open",
            "due_date": due(3).isoformat(),
            "gateway_id": charges[0] if len(charges) == 1 else None,
            "product_slug": None,
            **changes,
        }
        cast = {"value": "CAST(:value AS numeric)", "due_date": "CAST(:due_date AS date)"} if self._postgresql else {}
        names = list(values)
        marks = ", ".join(cast.get(name, f":{name}") for name in names)
        if self._postgresql:
            values["value"], values["due_date"] = Decimal(values["value"]), date.fromisoformat(values["due_date"])
        [row] = await self.sql(f"INSERT INTO payments ({', '.join(names)}) VALUES ({marks}) RETURNING id", **values)
        for number, charge in enumerate(charges if len(charges) > 1 else (), 1):
            await self._part(int(row["id"]), number, charge)
        return int(row["id"])

    async def _part(self, payment: int, number: int, charge: str) -> None:
        value: Any = Decimal("10.00") if self._postgresql else "10.00"
        day: Any = due(3) if self._postgresql else due(3).isoformat()
        await self.sql(
            """INSERT INTO installments (payment_id, number, value, due_date, gateway_id)
            VALUES (:payment, :number, :value, :day, :charge)""",
            payment=payment, number=number, value=value, day=day, charge=charge,
        )  # fmt: skip

    @property
    def _postgresql(self) -> bool:
        return self.site.kind == "services"

    @asynccontextmanager
    async def refusing(self, statement: str) -> AsyncIterator[None]:
        """While the block lasts the database refuses this statement of a repayment's transaction, as a trigger does."""
        event, table = statement.split(" ON ")
        which = {"audits": "NEW.auditable_type LIKE '%Payment'", "repayment_requests": "NEW.status = 'sent'"}
        when = f"WHEN ({which[table]})" if table in which else ""
        if self._postgresql:
            await self.sql(
                """CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN RAISE EXCEPTION 'as the test wants it'; END $$"""
            )
            action = "EXECUTE FUNCTION refuse()"
        else:
            action = "BEGIN SELECT RAISE(ABORT, 'as the test wants it'); END"
        await self.sql(f"CREATE TRIGGER refused BEFORE {event} ON {table} FOR EACH ROW {when} {action}")
        try:
            yield
        finally:
            await self.sql(f"DROP TRIGGER refused{f' ON {table}' if self._postgresql else ''}")

    async def replay(self, processor: str) -> None:
        """Have it read its stream from the first record on."""
        stream = _compose.readers(self.settings)[processor]
        moves = await _replay.find(self.engine, self.log, processor, stream, _replay.Place(first=True), None)
        await _replay.replay(self.engine, processor, moves, "test")

    # ---- looking

    async def read(self, records: int) -> None:
        """Wait until so many records of its stream are behind the processor."""

        async def are_read() -> None:
            self.check()
            rows = await self.sql("SELECT next_offset FROM processor_offsets WHERE processor = 'repayments'")
            assert rows
            assert rows[0]["next_offset"] >= records, rows

        await eventually(are_read)

    async def has_failed_once(self, reference: str) -> dict[str, Any]:
        """Wait until an attempt of a request has failed; its row."""

        async def has_failed() -> dict[str, Any]:
            self.check()
            row = await self.request(reference)
            assert row["last_error"], row
            return row

        return await eventually(has_failed)

    async def request(self, reference: str = "rep-1") -> dict[str, Any]:
        """The row of a request; an AssertionError while there is none."""
        rows = await self.sql("SELECT * FROM repayment_requests WHERE reference = :r", r=reference)
        assert rows, f"there is no request {reference} yet"
        return rows[0]

    async def is_now(self, status: str, reference: str = "rep-1", timeout: float = 30.0) -> dict[str, Any]:
        """Wait until a request has this status; its row."""

        async def has_status() -> dict[str, Any]:
            self.check()
            row = await self.request(reference)
            assert row["status"] == status, row
            return row

        return await eventually(has_status, timeout)

    async def written(self) -> dict[str, int]:
        """How many rows each table has, without a payment that was there before."""
        counts = {t: int((await self.sql(f"SELECT count(*) AS n FROM {t}"))[0]["n"]) for t in WRITTEN}
        [old] = await self.sql("SELECT count(*) AS n FROM payments WHERE reference LIKE 'old%'")
        [audits] = await self.sql("SELECT count(*) AS n FROM audits WHERE auditable_type LIKE '%Payment'")
        return counts | {"payments": counts["payments"] - int(old["n"]), "audits": int(audits["n"])}

    async def payment_status(self, payment: int) -> str:
        """The status of a payment."""
        [row] = await self.sql("SELECT status FROM payments WHERE id = :id", id=payment)
        return str(row["status"])

    async def payloads(self) -> list[dict[str, Any]]:
        """The payloads of all events."""
        rows = await self.sql("SELECT CAST(payload AS text) AS payload FROM outbox_events ORDER BY id")
        return [json.loads(row["payload"]) for row in rows]

    async def letter_of(self, reason: str) -> dict[str, Any]:
        """Wait for the one dead letter, which has this reason."""

        async def is_there() -> dict[str, Any]:
            self.check()
            letters = await self.dead_letters()
            assert [letter["reason"] for letter in letters] == [reason], letters
            return letters[0]

        return await eventually(is_there)
