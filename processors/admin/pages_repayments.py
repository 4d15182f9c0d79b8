"""To ask for a repayment: a form, checked for its form, written to the stream. Nothing else is asked or waited for.

Whether the payment exists, is open and may be split so is said by the processor, in the request's row or a dead letter.
"""

import asyncio
import re
from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from typing import Any

import structlog
from starlette.responses import Response

from models.repayment_requests import (
    MAX_INSTALLMENTS,
    InvalidRequest,
    RepaymentRequest,
    even_installments,
    new_reference,
)
from processors._repayment_request import new_trace, publish_request
from processors.admin.forms import Form
from processors.admin.office import Visit
from streams.errors import LogError, LogRefused

PUBLISH_SECONDS = 15.0

_AMOUNT = re.compile(r"(?:\d{1,3}(?:\.\d{3})+|\d{1,12})(?:,\d{1,2})?|\d{1,12}\.\d{1,2}")

log = structlog.get_logger(__name__)


async def ask(visit: Visit) -> Response:
    """The empty form, with a reference that nobody has used: a form that is sent twice is one request."""
    fields = {"reference": new_reference(), "billing_type": "BOLETO", "installments": "1"}
    return _form(visit, fields, "")


async def send(visit: Visit, form: Form) -> Response:
    """Into the stream, and no further."""
    fields = form.as_dict()
    try:
        request = read_request(fields, visit.user.name)
    except InvalidRequest as error:
        return _form(visit, fields, _SAYS.get(error.field.partition(".")[0], str(error)), 400)
    trace = new_trace()
    try:
        async with asyncio.timeout(PUBLISH_SECONDS):
            await visit.office.log.open()
            await publish_request(visit.office.log, visit.office.settings, request, trace)
    except (LogError, LogRefused, TimeoutError) as error:
        log.error("admin.not_published", reference=request.reference, error=type(error).__name__)  # noqa: TRY400
        return _form(visit, fields, _NOT_CONFIRMED, 503)
    log.info("admin.requested", reference=request.reference, by=visit.user.name)
    return visit.page("requested.html", asked=request, trace=trace)


def read_request(fields: Mapping[str, str], by: str) -> RepaymentRequest:
    """The request that a form says, an amount as Brazilians write it. Raises InvalidRequest."""
    value, first = _amount(fields.get("value", "")), fields.get("due_date", "")
    values: dict[str, Any] = {
        "reference": fields.get("reference", ""),
        "original_payment": _number(fields, "original_payment"),
        "customer": fields.get("customer") or None,
        "product_slug": fields.get("product_slug") or None,
        "billing_type": fields.get("billing_type", ""),
        "value": value,
        "due_date": first,
        "requested_by": by,
    }
    whole = RepaymentRequest.parse(values)  # first of all without parts, which are made of a good date and amount
    count = _number(fields, "installments") or 1
    if count == 1:
        return whole
    parts = even_installments(whole.value, count, date.fromisoformat(first))
    return RepaymentRequest.parse({**values, "installments": [part.model_dump() for part in parts]})


def _amount(text: str) -> Decimal | str:
    """1.200,00 as Decimal; what is no amount stays as it is, for the request to refuse."""
    if not _AMOUNT.fullmatch(text):
        return text
    brazilian = "," in text or re.fullmatch(r"\d{1,3}(?:\.\d{3})+", text)
    return Decimal(text.replace(".", "").replace(",", ".") if brazilian else text)


def _number(fields: Mapping[str, str], name: str) -> int | None:
    text = fields.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise InvalidRequest(name, "must be a number")
    return int(text)


_NOT_CONFIRMED = (
    "O pedido não foi confirmado: o stream não respondeu. Ele pode ter sido gravado ou não. "
    "Envie este mesmo formulário de novo: com a mesma referência não se cria outra cobrança."
)

_SAYS = {
    "reference": "Referência: até 100 letras, dígitos, pontos, hífens e sublinhados, começando por letra ou dígito.",
    "original_payment": "Pagamento original: é o número do pagamento.",
    "customer": "Cliente: escreva o id do cliente no gateway (cus_…), ou o pagamento original.",
    "product_slug": "Produto: até 100 letras minúsculas, dígitos, hífens e sublinhados.",
    "billing_type": "Escolha a forma de pagamento.",
    "value": "Valor: um valor maior que zero, como 1.200,00.",
    "due_date": "Vencimento: escolha uma data.",
    "installments": f"Parcelas: de 1 a {MAX_INSTALLMENTS}, com ao menos um centavo em cada uma.",
}


def _form(visit: Visit, fields: Mapping[str, str], error: str, status: int = 200) -> Response:
    names = ("reference", "original_payment", "customer", "product_slug", "billing_type", "value", "due_date")
    shown = {name: fields.get(name, "") for name in (*names, "installments")}
    return visit.page("request_new.html", status, fields=shown, error=error, most=MAX_INSTALLMENTS)
