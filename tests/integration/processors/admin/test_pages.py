"""The page on its socket and on both databases: what it answers, what it refuses, and what it never says."""

import asyncio
import re
from typing import Any
from urllib.parse import quote

import pytest
from structlog.testing import capture_logs

from processors._demo.sink import Sink
from processors.admin import looking
from processors.admin.guard import HEADERS
from streams.database import connect
from streams.logs import open_log
from streams.testing import eventually
from tests.integration.processors.admin.conftest import TOKEN, client
from tests.support.job import Job, people
from tests.support.page import BATCH, PASSWORD, AdminPage, batch, email, event, letter_of, position, rejected_item
from tests.support.sites import Site

PAGES = (
    *("/", "/events", "/events/1", "/events/confirm", "/emails", "/emails/1", "/emails/confirm", "/batches"),
    *("/requests", "/requests/new", "/letters", "/letters?every=1", "/letters/1", "/letters/2", "/positions"),
    *(
        "/events?state=failed&name=a.b&since=2026-01-01&until=2099-01-01&q=rep",
        "/emails?batch=d332&q=1&since=2026-01-01",
    ),
    *("/emails?state=unknown", "/emails?state=held&q=text%25_", "/letters?reason=attempts_used_up&before=9"),
    *("/requests?state=in+flight&q=rep&since=2026-01-01", f"/batches?batch={BATCH}&after={'0' * 64}"),
)


async def fill(admin: AdminPage) -> None:
    """A row of each kind."""
    [one, *_] = await admin.add(event("failed"), event("sent"), event("pending"))
    await admin.add(email("failed", 1), email("sent", 2), email(None, 3, batch_id=None))
    await admin.add(letter_of(one), rejected_item(4), position("mailer", "recipients"), *batch(5))


async def test_number_is_that_of_a_row_before_it_is_a_text(site: Site) -> None:
    """4 is event 4, and not every payload with a 4 in it; a number that no row has is looked for in payloads."""
    async with AdminPage(site) as admin, client(admin) as ana:
        await admin.add(*(event(payload={"repayment": {"reference": f"{n}4-777"}}) for n in range(5)))
        for text, ids in (("4", ["4"]), ("777", ["5", "4", "3", "2", "1"]), ("04-777", ["1"]), ("%", []), ("_", [])):
            _, page = await ana.get(f"/events?q={quote(text)}")
            assert re.findall(r'<a href="/events/(\d+)">', page) == ids, text


async def test_every_page_answers_on_both_databases(site: Site) -> None:
    """Under the same rules for the browser, errors included."""
    async with AdminPage(site) as admin, client(admin) as ana:
        await fill(admin)
        for path in PAGES:
            answer, text = await ana.get(path)
            assert answer.status == 200, f"{path}: {answer.status}"
            assert "</html>" in text
        for path, status in (("/events/999", 404), ("/nowhere", 404), ("/events?state=x", 400), ("/events/retry", 405)):
            answer, _ = await ana.get(path)
            assert answer.status == status, path
            assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS
            assert "server" not in answer.headers


async def test_nonsense_in_an_address_is_refused_on_both_databases(site: Site) -> None:
    """Numbers that no row can have, and what no text of a database can hold: the reader's mistake and not ours."""
    huge = 2**63
    async with AdminPage(site) as admin, client(admin) as ana:
        await fill(admin)
        for path in ("/events", "/emails", "/requests", "/letters"):
            answer, _ = await ana.get(f"{path}/{huge}")
            assert answer.status == 404, path
            answer, _ = await ana.get(f"{path}/{huge - 1}")
            assert answer.status == 404, path
        for path in ("/events?name=", "/events?q=", "/letters?reason=", "/batches?after=", "/events/confirm?name="):
            answer, text = await ana.get(f"{path}a%00b")
            assert answer.status == 400, path
            assert "Algo falhou" not in text
        for path in ("/emails/search", "/events/retry-all", "/requests/new"):
            answer, _ = await ana.post(path, address="a\0b", name="a\0b", reference="a\0b")
            assert answer.status == 400, path


async def test_files_of_the_page_are_asked_for_anew_only_when_they_have_changed(embedded_site: Site) -> None:
    """They are nobody's data, unlike all else; and there is nothing beside them."""
    async with AdminPage(embedded_site) as admin, client(admin, None) as nobody:
        for name in ("admin.css", "admin.js", "icon.svg"):
            answer, _ = await nobody.get(f"/static/{name}")
            assert (answer.status, answer.headers["cache-control"]) == (200, "no-cache")
            answer, _ = await nobody.get(f"/static/{name}", headers={"If-None-Match": answer.headers["etag"]})
            assert answer.status == 304
            assert answer.headers["x-content-type-options"] == "nosniff"
        for path in ("/static/", "/static/none", "/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py"):
            answer, _ = await nobody.get(path)
            assert answer.status == 404, path


async def test_stranger_sees_no_page_and_sends_no_form(site: Site) -> None:
    """Every address but the form for signing in and its files leads there."""
    async with AdminPage(site) as admin, client(admin, None) as nobody:
        await fill(admin)
        for path in PAGES:
            answer, text = await nobody.get(path)
            assert answer.status == 303, path
            assert answer.headers["location"].startswith("/login?next=/")
            assert text == ""
            assert "set-cookie" not in answer.headers
        for path in ("/events/retry", "/events/retry-all", "/requests/new", "/emails/search", "/logout"):
            answer, _ = await nobody.post(path, id=1)
            assert answer.status == 403, path
        assert await admin.state("outbox_events", 1) == ("failed", 3)


async def test_cookie_is_bound_to_this_host_and_to_tls(site: Site) -> None:
    """As a browser behind TLS gets it."""
    async with AdminPage(site, ADMIN_COOKIE_SECURE="true") as admin, client(admin, None) as nobody:
        answer, _ = await nobody.get("/login")
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith("__Host-afluente=")
        for word in ("Secure", "HttpOnly", "SameSite=lax", "Path=/"):
            assert word in cookie
        assert "Domain" not in cookie


async def test_session_has_another_id_after_signing_in(embedded_site: Site) -> None:
    """A cookie that somebody has put into the browser before is worth nothing after."""
    async with AdminPage(embedded_site) as admin, client(admin, None) as ana:
        await ana.get("/login")
        before = {c.key: c.value for c in ana.session.cookie_jar}["afluente"]
        await ana.sign_in()
        after = {c.key: c.value for c in ana.session.cookie_jar}["afluente"]
        assert before != after
        async with client(admin, None) as thief:
            answer, _ = await thief.get("/events", headers={"Cookie": f"afluente={before}"})
            assert answer.status == 303


async def test_password_or_role_that_changes_ends_sessions(embedded_site: Site) -> None:
    """After the restart with the new setting, which takes the old cookie for nobody's."""
    async with AdminPage(embedded_site) as admin, client(admin) as ana:
        cookie = {c.key: c.value for c in ana.session.cookie_jar}["afluente"]
        users = str(admin.environment["ADMIN_USERS"]).replace("ana:$", "ana:viewer:$")
    async with AdminPage(embedded_site, ADMIN_USERS=users) as admin, client(admin, None) as same:
        answer, _ = await same.get("/events", headers={"Cookie": f"afluente={cookie}"})
        assert answer.status == 303
        answer, _ = await same.get("/login", headers={"Cookie": f"afluente={cookie}"})
        assert answer.status == 200


async def test_request_under_another_name_is_refused(embedded_site: Site) -> None:
    """A page of somebody else that calls itself ours by name reaches nothing."""
    async with AdminPage(embedded_site) as admin, client(admin) as ana:
        answer, _ = await ana.get("/", headers={"Host": "evil.example.com"})
        assert answer.status == 400


async def test_form_that_is_none_or_too_large_is_refused(embedded_site: Site) -> None:
    """Whatever its length header says."""

    async def endless() -> Any:
        for _ in range(100):
            yield b"id=1&" * 1000

    async with AdminPage(embedded_site) as admin, client(admin) as ana:
        form = {"Origin": admin.url, "Content-Type": "application/x-www-form-urlencoded"}
        for data, headers, status in (
            (b"{}", {**form, "Content-Type": "application/json"}, 415),
            (b"x", {"Origin": admin.url}, 415),
            (b"a" * 70_000, form, 413),
            (endless(), form, 413),
            (b"\xff=1", form, 400),
            (b"&".join([b"a=1"] * 2000), form, 400),
        ):
            answer, _ = await ana.send("/events/retry", data=data, headers=headers)
            assert answer.status == status
        answer, _ = await ana.send("/events/retry", data=b"id=1", headers={"Content-Type": form["Content-Type"]})
        assert answer.status == 403  # no word of where it came from


async def test_log_names_pages_and_people_but_nothing_of_rows_and_queries(embedded_site: Site) -> None:
    """Neither an address that was searched, nor a reference, nor a number of a row."""
    async with AdminPage(embedded_site) as admin, client(admin) as ana:
        await fill(admin)
        with capture_logs() as lines:
            await ana.get("/events?q=secret-reference")
            await ana.get("/events/1")
            await ana.post("/emails/search", address="pessoa1@example.com")
            await ana.post("/events/retry", id=1)
        requests = [(line["route"], line["status"], line["by"]) for line in lines if line["event"] == "admin.request"]
        assert requests == [
            ("/events", 200, "ana"),
            ("/events/{id:int}", 200, "ana"),
            ("/emails/search", 200, "ana"),
            ("/events/retry", 200, "ana"),
        ]
        assert "secret" not in str(lines)
        assert "pessoa1" not in str(lines)


async def test_page_that_fails_tells_nothing_of_why(embedded_site: Site) -> None:
    """The error may hold a row; the answer has the rules of every page."""
    async with AdminPage(embedded_site) as admin, client(admin) as ana:
        await admin.sql("DROP TABLE processor_offsets")
        answer, text = await ana.get("/positions")
        assert answer.status == 500
        assert "processor_offsets" not in text
        assert answer.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]


async def test_database_that_is_away_is_said(embedded_site: Site) -> None:
    """Whoever signs in meanwhile reads that, and not that the page is broken."""
    away = connect("postgresql+asyncpg://nobody@127.0.0.1:1/nothing", "test")
    async with AdminPage(embedded_site, engine=away) as admin, client(admin, None) as ana:
        _, text = await ana.get("/login")
        ana.token = TOKEN.findall(text)[0]
        answer, _ = await ana.post("/login", user="ana", password=PASSWORD, next="/")
        assert answer.status == 303
        for path in ("/", "/events", "/letters"):
            answer, text = await ana.get(path)
            assert answer.status == 503, path
            assert "O banco de dados não responde" in text
    await away.dispose()


async def test_look_that_takes_too_long_is_ended_and_said(services_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has locked the table, or the filter asks for too much: no page waits for ever."""
    monkeypatch.setattr(looking, "LOOK_SECONDS", 1)
    async with AdminPage(services_site) as admin, client(admin) as ana, admin.engine.connect() as other:
        await other.exec_driver_sql("LOCK TABLE outbox_events IN ACCESS EXCLUSIVE MODE")
        answer, text = await ana.get("/events")
        assert answer.status == 503
        assert "demorou demais" in text
        await other.rollback()
        answer, _ = await ana.get("/events")
        assert answer.status == 200


async def test_row_that_somebody_has_locked_is_named_and_the_others_are_retried(services_site: Site) -> None:
    """An open psql holds one row: three seconds later the page says so."""
    async with AdminPage(services_site) as admin, client(admin) as ana, admin.engine.connect() as other:
        ids = await admin.add(*(event("failed") for _ in range(3)))
        await other.exec_driver_sql(f"SELECT 1 FROM outbox_events WHERE id = {ids[1]} FOR UPDATE")
        answer, text = await ana.post("/events/retry", id=ids)
        assert answer.status == 200
        assert "bloqueado por outra transação" in text
        await other.rollback()
        states = [await admin.state("outbox_events", row_id) for row_id in ids]
        assert states == [("pending", 0), ("failed", 3), ("pending", 0)]


async def test_row_is_retried_once_when_two_people_press_at_once(site: Site) -> None:
    """One of them is told that it waits already; the audit has one change."""
    async with AdminPage(site) as admin, client(admin) as ana, client(admin) as again:
        [one] = await admin.add(event("failed"))
        answers = await asyncio.gather(*(each.post("/events/retry", id=one) for each in (ana, again)))
        assert sorted("já aguarda a sua vez" in text for _, text in answers) == [False, True]
        rows = await admin.sql("SELECT tags FROM audits WHERE event = 'updated'")
        assert [row["tags"] for row in rows] == ["afluente retry by ana"]


async def test_mail_that_is_in_mid_send_is_not_retried_and_goes_out_once(services_site: Site, sink: Sink) -> None:
    """The page says in progress while the mail server thinks about the final dot; one mail (O-41)."""
    sink.script("dot", delay=12.0, times=1)
    times: dict[str, Any] = {"ACT_TIMEOUT_SECONDS": "40", "REPLY_TIMEOUT_SECONDS": "40"}
    async with Job(services_site, sink, **times) as job, AdminPage(services_site) as admin, client(admin) as ana:
        await job.publish(people(1))

        async def is_claimed() -> int:
            row = await job.row(1)
            assert row["lease_until"] is not None
            return int(row["id"])

        one = await eventually(is_claimed)
        _, text = await ana.post("/emails/retry", id=one)
        assert "em andamento, não repetido" in text
        _, text = await ana.get(f"/emails/{one}")
        assert "Está sendo enviado agora" in text
        await job.settled(1, 60)
        assert (await job.row(1))["status"] == "sent"
        assert len(sink.mails) == 1
        _, text = await ana.post("/emails/retry", id=one)
        assert "já enviado, não repetido" in text


async def test_bulk_retry_reads_the_filter_that_was_confirmed_or_refuses(site: Site) -> None:
    """A filter that cannot be read retries nothing instead of everything."""
    async with AdminPage(site) as admin, client(admin) as ana:
        [one] = await admin.add(event("failed"))
        for fields in (
            {"since": "x", "asked": "2099-01-01T00:00:00+00:00"},
            {"asked": "x"},
            {},
            {"asked": "2099-01-01"},
        ):
            answer, _ = await ana.post("/events/retry-all", **fields)
            assert answer.status == 400, fields
        assert await admin.state("outbox_events", one) == ("failed", 3)
        answer, _ = await ana.post("/events/retry-all", asked="2099-01-01T00:00:00+00:00", state="sent")
        assert answer.status == 200
        assert await admin.state("outbox_events", one) == ("pending", 0)


async def test_stream_that_does_not_answer_is_said_and_the_form_keeps_its_reference(embedded_site: Site) -> None:
    """To send it again is safe, and the page says so."""
    away = open_log("rabbitmq-stream://nobody:nobody@127.0.0.1:1/", label="test")
    async with AdminPage(embedded_site, log=away) as admin, client(admin) as ana:
        answer, text = await ana.post(
            "/requests/new",
            reference="rep-kept", customer="cus_1", value="10,00", due_date="2099-01-01", billing_type="PIX",
            installments=1,
        )  # fmt: skip
        assert answer.status == 503
        assert 'value="rep-kept"' in text
        assert "não foi confirmado" in text
    await away.close()
