"""`afluente repayment`, from a process of its own: asking, and trying again."""

from collections.abc import AsyncIterator

import pytest

from streams.exit_codes import ExitCode
from tests.support.asaas import CUSTOMER, Asaas, Trouble
from tests.support.command import afluente
from tests.support.repayments import Repaying, a_request, due
from tests.support.sites import Site

REQUEST = ("repayment", "request", "--by", "ana", "--value", "100.00")


@pytest.fixture
async def asaas() -> AsyncIterator[Asaas]:
    """The payment gateway."""
    async with Asaas() as asaas:
        yield asaas


async def test_repayment_is_brought_about_when_the_command_asks_for_it(site: Site, asaas: Asaas) -> None:
    """Also beside running processors; the command itself calls nobody outside, so it ends while the gateway hangs."""
    asaas.may_answer.clear()
    async with Repaying(site, asaas, processors=("outbox_relay", "repayments")) as desk:
        payment = await desk.payment(asaas.charge())
        asked = await afluente(
            desk.environment,
            *(*REQUEST, "--due-date", due().isoformat(), "--original-payment", str(payment)),
            *("--installments", "3", "--billing-type", "PIX", "--reference", "rep-1"),
        )
        assert (asked.code, asked.out) == (ExitCode.OK, f"requested rep-1 in {site.name}-repayment-requests\n"), (
            asked.err
        )
        asaas.may_answer.set()
        await desk.is_now("sent")
        [repayment] = await desk.sql("SELECT * FROM repayments")
        shown = await afluente(desk.environment, "status")
    assert (repayment["reference"], repayment["requested_by"]) == ("rep-1", "ana")
    assert [part["billingType"] for part in asaas.live("rep-1")] == ["PIX"] * 3
    assert "requests for repayments: 1 sent" in shown.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--due-date", "2027-01-31"), "customer: is needed where there is no original payment"),
        (("--due-date", "31/01/2027", "--customer", CUSTOMER), "due_date: must be a date as YYYY-MM-DD"),
        (("--due-date", "2027-01-31", "--customer", "ana"), "customer: must be the gateway's id"),
        (("--due-date", "2027-01-31", "--customer", CUSTOMER, "--billing-type", "X"), "billing_type: must be BOLETO"),
        (("--due-date", "2027-01-31", "--customer", CUSTOMER, "--installments", "0"), "installments: must be 1 to 60"),
        (("--due-date", "2027-01-31", "--customer", CUSTOMER, "--value", "1,00"), "value: must be an amount as text"),
    ],
)
async def test_field_is_named_and_nothing_is_requested_when_it_is_wrong(
    embedded_site: Site, asaas: Asaas, arguments: tuple[str, ...], says: str
) -> None:
    """With the exit code of bad input."""
    async with Repaying(embedded_site, asaas, processors=("repayments",)) as desk:
        asked = await afluente(desk.environment, *REQUEST, *arguments)
        [partition] = await desk.log.partitions(desk.settings.repayment_requests_stream)
        assert (await desk.log.bounds(partition)).next == 0
    assert (asked.code, asked.out) == (ExitCode.BAD_INPUT, "")
    assert f"afluente: {says}" in asked.err
    assert "nothing was requested" in asked.err


async def test_failed_request_is_done_when_a_person_retries_or_redrives_it(site: Site, asaas: Asaas) -> None:
    """By its number, by its error, by its dead letter; what is done stays as it is; and each made one charge."""
    asaas.script = lambda call: Trouble(500) if call.method == "POST" else None
    async with Repaying(site, asaas, processors=("outbox_relay", "repayments"), BACKOFF_SECONDS="0.1") as desk:
        names = ("rep-1", "rep-2", "rep-3")
        for name in names:
            await desk.ask(a_request(name))
            await desk.is_now("failed", name)
        asaas.script = lambda call: None
        first = (await desk.request("rep-1"))["id"]
        letter = (await desk.dead_letters())[2]
        done = await afluente(desk.environment, "repayment", "retry", str(first), "999")
        assert (done.code, done.out) == (ExitCode.FAILED, "1 request retried\n")
        assert "there is no request 999" in done.err
        await desk.is_now("sent", "rep-1")
        outlook = await afluente(desk.environment, "dead-letters", "redrive", "--id", str(letter["id"]), "--dry-run")
        assert "events: 0; repayments: 1; nothing was changed" in outlook.out
        await afluente(desk.environment, "dead-letters", "redrive", "--id", str(letter["id"]))
        await desk.is_now("sent", "rep-3")
        done = await afluente(desk.environment, "repayment", "retry", "--error", "HTTP 500")
        assert (done.code, done.out) == (ExitCode.OK, "1 request retried\n"), done.err
        await desk.is_now("sent", "rep-2")
        refused = await afluente(desk.environment, "repayment", "retry", str(first))
        assert f"request {first} was sent: not retried" in refused.err
    assert [len(asaas.live(name)) for name in names] == [1, 1, 1]


async def test_run_all_leaves_repayments_out_where_there_is_no_gateway(embedded_site: Site, asaas: Asaas) -> None:
    """Asked for by name it says what it needs."""
    desk = Repaying(embedded_site, asaas, ASAAS_API_URL=None, ASAAS_API_TOKEN=None)
    from processors import _compose

    assert "repayments" not in _compose.all_names(desk.settings)
    assert "repayments" in _compose.all_names(Repaying(embedded_site, asaas).settings)
    done = await afluente(desk.environment, "run", "repayments")
    assert done.code == ExitCode.BAD_SETTINGS
    assert "ASAAS_API_URL is missing" in done.err
    assert "ASAAS_API_TOKEN is missing" in done.err
