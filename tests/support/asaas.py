"""A payment gateway that behaves as Asaas' public API, version 3: charges, plans, its errors; and what goes wrong.

`script` may have a request refused, or applied and its answer lost. Amounts are Decimal, and JSON numbers on the wire.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import orjson
from aiohttp import web

from models.repayment_requests import even_installments

TOKEN = "$aact_invented-token"
CUSTOMER = "cus_000005219613"
BODY: web.RequestKey[dict[str, Any]] = web.RequestKey("body", dict)
PAID = {"RECEIVED", "CONFIRMED", "RECEIVED_IN_CASH"}


@dataclass(frozen=True)
class Trouble:
    """What becomes of a request: `lose` applies it and ends the connection; else this answer, nothing applied."""

    status: int = 500
    body: bytes = b"<html>boom</html>"
    headers: dict[str, str] = field(default_factory=dict)
    lose: bool = False


@dataclass(frozen=True)
class Call:
    """One request as it came."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: dict[str, Any]


Script = Callable[[Call], Trouble | None]


def error(status: int, code: str, description: str) -> web.Response:
    """An error as the API words it."""
    return _json({"errors": [{"code": code, "description": description}]}, status)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json")


class Asaas:
    """Listens for the time of the block."""

    def __init__(self) -> None:
        self.payments: dict[str, dict[str, Any]] = {}
        """By id, in the order of their creation."""
        self.calls: list[Call] = []
        self.script: Script = lambda call: None
        self.latency = 0.0
        self.hidden = 0
        """So many of the youngest payments are not in lists yet."""
        self.holds: Callable[[Call], asyncio.Event | None] = lambda call: None
        """What a request waits for before it is applied."""
        self.may_answer = asyncio.Event()
        """Cleared, every request waits before it is applied."""
        self.may_answer.set()
        self.waiting = 0
        self._invoices = 0
        self._port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """What ASAAS_API_URL is."""
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[self._through])
        app.add_routes(
            [
                web.post("/v3/payments", self._create),
                web.get("/v3/payments", self._list),
                web.get("/v3/payments/{id}", self._get),
                web.delete("/v3/payments/{id}", self._delete),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.may_answer.set()
        if self._runner is not None:
            await self._runner.cleanup()

    # ---- what a test says and asks

    def charge(self, reference: str = "old", value: str = "100.00", parts: int = 1, **changes: Any) -> list[str]:
        """A charge that is there before; the ids of its payments."""
        due = datetime.now(UTC).date() + timedelta(days=3)
        return [p["id"] for p in self._make(CUSTOMER, "BOLETO", reference, Decimal(value), due, parts, changes)]

    def live(self, reference: str) -> list[dict[str, Any]]:
        """The payments of a reference that are not cancelled."""
        return [p for p in self.payments.values() if p["externalReference"] == reference and not p["deleted"]]

    def made(self, method: str) -> int:
        """How many requests of a method there were."""
        return sum(call.method == method for call in self.calls)

    # ---- every request

    @web.middleware
    async def _through(self, request: web.Request, handler: Any) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw, parse_float=Decimal) if raw else {}
        call = Call(
            request.method, request.path, dict(request.query), {k.lower(): v for k, v in request.headers.items()}, body
        )
        self.calls.append(call)
        await asyncio.sleep(self.latency)
        self.waiting += 1
        await (self.holds(call) or self.may_answer).wait()
        self.waiting -= 1
        trouble = self.script(call)
        if trouble is not None and not trouble.lose:
            return web.Response(status=trouble.status, body=trouble.body, headers=trouble.headers)
        if call.headers.get("access_token") != TOKEN:
            return error(401, "invalid_access_token", "A chave de API fornecida é inválida")
        if request.method == "GET" and raw:
            return web.Response(status=403)
        request[BODY] = body
        answer: web.StreamResponse = await handler(request)
        if trouble is not None and request.transport is not None:
            request.transport.abort()
        return answer

    # ---- the API

    async def _create(self, request: web.Request) -> web.Response:
        body = request[BODY]
        if not str(body.get("customer", "")).startswith("cus_") or body["customer"] == "cus_unknown":
            return error(400, "invalid_customer", "Customer inválido ou não informado.")
        if body.get("billingType") not in {"BOLETO", "PIX", "CREDIT_CARD", "UNDEFINED"}:
            return error(400, "invalid_billingType", "O campo billingType é inválido.")
        due = date.fromisoformat(body["dueDate"])
        if due < datetime.now(UTC).date() - timedelta(days=1):
            return error(400, "invalid_dueDate", "O vencimento não pode ser anterior a hoje.")
        parts = int(body.get("installmentCount", 1))
        total = body.get("value", body.get("totalValue", 0))
        if "installmentValue" in body and "totalValue" not in body:
            total = Decimal(body["installmentValue"]) * parts
        if ("value" in body) == ("installmentCount" in body) or Decimal(total) <= 0:
            return error(400, "invalid_value", "O valor da cobrança deve ser informado.")
        reference = str(body.get("externalReference"))
        made = self._make(body["customer"], body["billingType"], reference, Decimal(total), due, parts, {})
        return _json(_shown(made[0]))

    async def _list(self, request: web.Request) -> web.Response:
        offset, limit = int(request.query.get("offset", 0)), min(int(request.query.get("limit", 10)), 100)
        wanted = request.query.get("externalReference")
        shown = list(self.payments.values())
        shown = shown[: len(shown) - self.hidden]
        found = [p for p in reversed(shown) if wanted is None or p["externalReference"] == wanted]
        page = found[offset : offset + limit]
        return _json(
            {
                "object": "list",
                "hasMore": offset + limit < len(found),
                "totalCount": len(found),
                "limit": limit,
                "offset": offset,
                "data": [_shown(payment) for payment in page],
            }
        )

    async def _get(self, request: web.Request) -> web.Response:
        payment = self.payments.get(request.match_info["id"])
        return web.Response(status=404) if payment is None else _json(_shown(payment))

    async def _delete(self, request: web.Request) -> web.Response:
        payment = self.payments.get(request.match_info["id"])
        if payment is None:
            return web.Response(status=404)
        if payment["deleted"]:
            return error(400, "invalid_action", "A cobrança já foi removida.")
        if payment["status"] in PAID:
            return error(400, "invalid_action", "A cobrança não pode ser removida: o pagamento já foi recebido.")
        payment["deleted"] = True
        return _json({"deleted": True, "id": payment["id"]})

    # ---- making payments

    def _make(
        self, customer: str, kind: str, reference: str, total: Decimal, due: date, parts: int, changes: dict[str, Any]
    ) -> list[dict[str, Any]]:
        plan = str(uuid4()) if parts > 1 else None
        made = []
        for part in even_installments(total, parts, due):
            self._invoices += 1
            payment = {
                "object": "payment",
                "id": f"pay_{uuid4().hex[:16]}",
                "dateCreated": datetime.now(UTC).date().isoformat(),
                "customer": customer,
                "installment": plan,
                "installmentNumber": part.number if plan else None,
                "value": part.value,
                "netValue": part.value - Decimal("0.99"),
                "billingType": kind,
                "status": "PENDING",
                "dueDate": part.due_date.isoformat(),
                "externalReference": reference,
                "invoiceNumber": f"{self._invoices:08}",
                "deleted": False,
                **changes,
            }
            self.payments[payment["id"]] = payment
            made.append(payment)
        return made


def _shown(payment: dict[str, Any]) -> dict[str, Any]:
    return {name: orjson.Fragment(str(v)) if isinstance(v, Decimal) else v for name, v in payment.items()}
