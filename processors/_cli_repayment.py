"""`afluente repayment`: a debt split anew, asked for; and requests that failed, tried again."""

import asyncio
from typing import Annotated

import typer

from models.base import MAX_ID
from models.repayment_requests import InvalidRequest, RepaymentRequest, even_installments, new_reference
from models.tables import RepaymentRequestRow
from processors import _house
from processors._commands import By, with_database
from processors._console import err, fail, named, out
from processors._repayment_request import publish_request
from processors._retry import REQUESTS, Wanted, retry_rows
from processors._settings import Settings, load_settings
from streams.exit_codes import ExitCode

app = typer.Typer(help="Repayments: ask for one, try those again that failed.", no_args_is_help=True)


@app.command()
@named
def request(  # noqa: PLR0913 - one option for each field
    by: By,
    *,
    value: Annotated[str, typer.Option(help="in all, such as 1200.00")],
    due_date: Annotated[str, typer.Option(help="YYYY-MM-DD, of the first part")],
    billing_type: Annotated[str, typer.Option(help="BOLETO, PIX or CREDIT_CARD")] = "BOLETO",
    original_payment: Annotated[int | None, typer.Option(help="the payment that is split anew, by its id")] = None,
    customer: Annotated[str | None, typer.Option(help="the gateway's id; needed without an original payment")] = None,
    product_slug: Annotated[str | None, typer.Option(help="if it is not that of the original")] = None,
    installments: Annotated[int, typer.Option(help="equal parts, month by month; 1: one charge")] = 1,
    reference: Annotated[str | None, typer.Option(help="asked for again, makes no second charge; default: new")] = None,
) -> None:
    """Write a request to its stream, and say its reference. What becomes of it is in `repayment_requests`."""
    fields = {
        "reference": reference or new_reference(),
        "original_payment": original_payment,
        "customer": customer,
        "product_slug": product_slug,
        "billing_type": billing_type,
        "value": value,
        "due_date": due_date,
        "requested_by": by,
    }
    try:
        wanted = _split(RepaymentRequest.parse(fields), installments)
    except InvalidRequest as error:
        raise fail(ExitCode.BAD_INPUT, f"{error}; nothing was requested") from None
    settings = load_settings()
    known_as = asyncio.run(_publish(settings, wanted))
    out.print(f"requested {known_as} in {settings.repayment_requests_stream}", markup=False)


def _split(wanted: RepaymentRequest, parts: int) -> RepaymentRequest:
    if parts == 1:
        return wanted
    return wanted.model_copy(update={"installments": even_installments(wanted.value, parts, wanted.due_date)})


async def _publish(settings: Settings, wanted: RepaymentRequest) -> str:
    log = _house.connect_log(settings, "afluente repayment")
    try:
        await log.open()
        return await publish_request(log, settings, wanted)
    finally:
        await log.close()


@app.command()
@named
def retry(
    by: By,
    ids: Annotated[
        list[int] | None, typer.Argument(metavar="[ID]...", min=1, max=MAX_ID, help="these requests")
    ] = None,
    error: Annotated[str | None, typer.Option(help="all failed ones with this text in their last error")] = None,
    everything: Annotated[bool, typer.Option("--all", help="all failed ones")] = False,
) -> None:
    """Let requests be tried again from the first attempt on; what was done is looked up at the gateway first."""
    if [bool(ids), error is not None, everything].count(True) != 1:
        raise typer.BadParameter("say which: ids, or --error, or --all")
    column = RepaymentRequestRow.__table__.c  # type: ignore[attr-defined]
    conditions = [column.last_error.contains(error, autoescape=True)] if error is not None else []
    wanted = Wanted(REQUESTS, by, ids or [], conditions)
    done = with_database(lambda engine: retry_rows(engine, wanted))
    for number, why in done.refused.items():
        sentence = (
            f"there is no request {number}" if why == "does not exist" else f"request {number} {why}: not retried"
        )
        err.print(sentence, markup=False)
    out.print(f"{len(done.done):,} request{'' if len(done.done) == 1 else 's'} retried")
    if ids and done.refused:
        raise fail(ExitCode.FAILED, f"{len(done.refused)} not retried")
