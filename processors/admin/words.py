"""The page's words, in Portuguese, and how times, numbers and texts are written in it."""

import json
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

import orjson
from markupsafe import Markup

from processors._retry import Refusal

BRASILIA = timezone(timedelta(hours=-3), "UTC-3")
"""Brazil has had no summer time since 2019; a machine without a time zone database knows this as well."""

MAX_SHOWN = 200_000
"""Characters of a payload or a body that are shown."""

STATES = {
    "pending": "aguardando",
    "in flight": "em andamento",
    "sent": "enviado",
    "failed": "falhou",
    "held": "retido",
    "unknown": "sem estado",
}
"""What a row is in at the moment. `unknown`: inserted by the old code."""

REFUSALS: dict[Refusal, str] = {
    "was sent": "já enviado, não repetido",
    "is held": "retido, não repetido: pode ter chegado, uma pessoa decide",
    "is in flight": "em andamento, não repetido",
    "is waiting already": "já aguarda a sua vez, não repetido",
    "is locked by somebody": "bloqueado por outra transação, não repetido",
    "does not exist": "não existe",
}

LETTER_STATES = {
    "open": "aberta",
    "held": "retida",
    "sent": "resolvida: enviado",
    "in flight": "em andamento",
    "waiting": "aguardando nova tentativa",
    "failed again": "falhou de novo: há outra mensagem",
    "gone": "a linha não existe mais",
    "redriven": "reprocessada",
}

REASONS = {
    "attempts_used_up": "tentativas esgotadas",
    "outcome_unknown": "resultado desconhecido",
    "invalid_registration": "inscrição inválida",
    "too_large": "grande demais",
    "undecodable": "mensagem ilegível",
    "refused": "recusado",
    "rejected": "recusado",
    "kills_its_reader": "derruba quem a lê",
    "unexpected_error": "erro inesperado",
    "invalid_address": "endereço inválido",
    "needs_smtputf8": "endereço que o servidor não aceita",
    "not_json": "não é JSON",
    "not_an_array": "não é uma lista",
    "not_utf8": "não é UTF-8",
    "byte_order_mark": "começa com BOM",
    "too_deep": "aninhado demais",
    "too_many_items": "itens demais",
    "bad_slice": "fatia incoerente",
    "unknown_type": "tipo desconhecido",
    "unknown_version": "versão desconhecida",
    "bad_message": "mensagem malformada",
    "wrong_key": "chave trocada",
    "unknown_mailable": "e-mail de tipo desconhecido",
    "invalid_request": "pedido inválido",
    "unknown_payment": "pagamento desconhecido",
    "paid_already": "já foi pago",
    "cancelled_already": "já foi cancelado",
    "past_due_date": "vencimento no passado",
    "installments_do_not_sum_up": "as parcelas não somam o valor",
    "installments_not_offered": "o gateway não parcela assim",
    "customer_differs": "o pagamento é de outro cliente",
    "another_request": "já há outro pedido",
    "reference_taken": "a referência é de outro pagamento",
    "refused_by_gateway": "recusado pelo gateway",
}


PAYMENT_STATES = {
    "open": "em aberto",
    "overdue": "vencido",
    "paid": "pago",
    "cancelled": "cancelado",
    "renegotiated": "reparcelado",
}


def state_of(status: str | None, held: bool, lease_until: datetime | None, now: datetime) -> str:
    """A key of STATES."""
    if status is None:
        return "unknown"
    if status == "failed" and held:
        return "held"
    if status == "pending" and lease_until is not None and lease_until > now:
        return "in flight"
    return status


# ---- times and numbers


def when(at: datetime | None) -> Markup:
    """A moment in Brasília's time; the tooltip has it in UTC, as logs and psql do."""
    if at is None:
        return Markup("—")
    utc = at.astimezone(UTC)
    text = at.astimezone(BRASILIA).strftime("%d/%m/%Y %H:%M:%S")
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(
        utc.strftime("%Y-%m-%dT%H:%M:%SZ"), utc.strftime("%Y-%m-%d %H:%M:%S"), text
    )


def ago(at: datetime | None, now: datetime) -> str:
    """How long since, in one unit."""
    if at is None:
        return "nunca"
    seconds = max(int((now - at).total_seconds()), 0)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"há {seconds // size} {unit}"
    return f"há {seconds} s"


def number(value: int | None) -> str:
    """With dots between thousands."""
    return "—" if value is None else f"{value:,}".replace(",", ".")


def several(count: int, one: str, more: str) -> str:
    """A number and what it counts."""
    return f"{number(count)} {one if count == 1 else more}"


def money(value: Decimal | None) -> str:
    """An amount in reais."""
    return "—" if value is None else "R$ " + f"{value:,.2f}".replace(",", " ").replace(".", ",").replace(" ", ".")


# ---- texts of others


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object; one in which a name comes twice would lose something by being written anew."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice")
    return found


def pretty(text: str | bytes | None) -> str:
    """JSON with its lines indented, its numbers as they were written; any other text as it is. Never fails."""
    if text is None:
        return ""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    shown = text[:MAX_SHOWN]
    if shown != text:
        return f"{shown}\n[… cortado: {number(len(text))} caracteres]"
    try:
        value = json.loads(
            text,
            parse_float=orjson.Fragment,
            parse_int=orjson.Fragment,
            parse_constant=_refuse,
            object_pairs_hook=_object,
        )
        if isinstance(value, dict | list):
            return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
    except (ValueError, TypeError, RecursionError, orjson.JSONEncodeError):
        pass
    return text
