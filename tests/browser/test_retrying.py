"""Retries by an operator: one, many, all of a filter; what is refused; and that the engine then does its work once."""

import json
from collections import Counter

from playwright.async_api import expect

from processors._demo.sink import Sink
from streams.testing import eventually
from tests.browser.conftest import People, Person, signed_in
from tests.support.job import Job, address, people
from tests.support.outbox import Outbox
from tests.support.page import AdminPage, email, event, in_flight
from tests.support.receiver import Receiver, Reply
from tests.support.sites import Site

NOW = "de volta à espera, com todas as tentativas."


async def retried(one: Person, count: int) -> None:
    """The page says that so many are on their way again."""
    await expect(one.tab.get_by_role("status")).to_have_text(f"{count} {NOW}")


async def audited(admin: AdminPage, table: str, ids: list[int]) -> None:
    """Each of them was made pending by ana, who is named."""
    for row_id in ids:
        found = await admin.sql(
            """SELECT new_values, tags FROM audits WHERE auditable_type = :type AND auditable_id = :id
            ORDER BY id DESC LIMIT 1""",
            type={"outbox_events": "App\\Models\\OutboxEvent", "email_dispatches": "App\\Models\\EmailDispatch"}[table],
            id=row_id,
        )
        assert (json.loads(found[0]["new_values"])["status"], found[0]["tags"]) == (
            "pending",
            "afluente retry by ana",
        )


# ---- the page alone


async def test_one_is_retried_from_its_own_page(site: Site, person: People) -> None:
    """pending, attempts 0, no error; and who did it."""
    async with signed_in(person, site) as (admin, ana):
        [one] = await admin.add(event("failed"))
        await ana.open(f"/events/{one}")
        await ana.tab.get_by_role("button", name="Repetir").click()
        await retried(ana, 1)
        assert await admin.state("outbox_events", one) == ("pending", 0)
        await audited(admin, "outbox_events", [one])
        await ana.open(f"/events/{one}")
        await expect(ana.tab.get_by_role("button", name="Repetir")).to_have_count(0)
        await expect(ana.tab.locator(".history")).to_contain_text("afluente retry by ana")


async def test_those_that_were_ticked_are_retried(services_site: Site, person: People) -> None:
    """All of a page with one click, or some; others stay as they are."""
    async with signed_in(person, services_site) as (admin, ana):
        ids = await admin.add(*(email("failed", n) for n in range(4)), email("sent", 9))
        await ana.open("/emails")
        button = ana.tab.get_by_role("button", name="Repetir os marcados")
        await expect(button).to_be_disabled()
        await ana.tab.get_by_label("Marcar todas as que falharam nesta página").check()
        await expect(button).to_have_text("Repetir os marcados (4)")
        await ana.tab.get_by_label(f"Marcar o número {ids[0]}", exact=True).uncheck()
        await expect(button).to_have_text("Repetir os marcados (3)")
        await button.click()
        await retried(ana, 3)
        assert await admin.state("email_dispatches", ids[0]) == ("failed", 3)
        for row_id in ids[1:4]:
            assert await admin.state("email_dispatches", row_id) == ("pending", 0)
        await audited(admin, "email_dispatches", ids[1:4])


async def test_all_of_a_filter_are_retried_after_their_number_was_shown(services_site: Site, person: People) -> None:
    """Neither those of another event, nor held ones, nor one that failed after the question."""
    async with signed_in(person, services_site) as (admin, ana):
        ids = await admin.add(*(event("failed", event_name="a.b") for _ in range(60)))
        [other, held] = await admin.add(event("failed"), event("failed", event_name="a.b", held=True))
        await ana.open("/events?name=a.b")
        await ana.tab.get_by_role("link", name="Repetir todos os que falharam neste filtro").click()
        await expect(ana.tab.locator(".big")).to_have_text("60 eventos que falharam correspondem ao filtro.")
        [late] = await admin.add(event("failed", event_name="a.b"))
        await admin.sql("UPDATE outbox_events SET updated_at = '2099-01-01 00:00:00+00:00' WHERE id = :id", id=late)
        await ana.tab.get_by_role("button", name="Repetir 60").click()
        await retried(ana, 60)
        for row_id in (ids[0], ids[-1]):
            assert await admin.state("outbox_events", row_id) == ("pending", 0)
        for row_id in (other, held, late):
            assert await admin.state("outbox_events", row_id) == ("failed", 3)
        await audited(admin, "outbox_events", ids[:2])


async def test_what_changed_since_the_list_was_shown_is_refused_by_name(embedded_site: Site, person: People) -> None:
    """In flight, sent, held, waiting, gone: each says why, and the one that failed is retried all the same."""
    async with signed_in(person, embedded_site) as (admin, ana):
        ids = await admin.add(*(event("failed") for _ in range(6)))
        await ana.open("/events")
        await ana.tab.get_by_label("Marcar todas as que falharam nesta página").check()
        flying = in_flight()
        changes = {
            ids[0]: "status = 'pending', lease_until = '2099-01-01 00:00:00+00:00'",
            ids[1]: "status = 'sent'",
            ids[2]: "held = true",
            ids[3]: "status = 'pending', attempts = 1",
        }
        for row_id, change in changes.items():
            await admin.sql(f"UPDATE outbox_events SET {change} WHERE id = {row_id}")
        await admin.sql("DELETE FROM outbox_events WHERE id = :id", id=ids[4])
        await ana.tab.get_by_role("button", name="Repetir os marcados").click()
        await retried(ana, 1)
        said = ana.tab.locator("main")
        await expect(said).to_contain_text(f"{ids[0]}: em andamento, não repetido")
        await expect(said).to_contain_text(f"{ids[1]}: já enviado, não repetido")
        await expect(said).to_contain_text(f"{ids[2]}: retido, não repetido")
        await expect(said).to_contain_text(f"{ids[3]}: já aguarda a sua vez, não repetido")
        await expect(said).to_contain_text(f"{ids[4]}: não existe")
        assert flying.status == "pending"
        assert await admin.state("outbox_events", ids[3]) == ("pending", 1)
        assert await admin.state("outbox_events", ids[5]) == ("pending", 0)


async def test_viewer_finds_nothing_to_press(embedded_site: Site, person: People) -> None:
    """Who may only look is not led into a refusal."""
    async with signed_in(person, embedded_site, "bia") as (admin, bia):
        [one] = await admin.add(event("failed"))
        for path in ("/events", f"/events/{one}", "/events/confirm", "/requests", "/requests/new"):
            await bia.open(path)
            await expect(bia.tab.locator("h1")).to_be_visible()
            await expect(bia.tab.locator("main").get_by_role("button", name="Repetir")).to_have_count(0)
            await expect(bia.tab.locator("main").get_by_role("button", name="Solicitar")).to_have_count(0)


# ---- with the engine


async def test_event_that_failed_is_sent_once_after_a_retry(
    services_site: Site, person: People, receiver: Receiver
) -> None:
    """pending with attempts 0 while the engine rests; then one request more, and sent."""
    receiver.script = lambda request: Reply(503)
    async with Outbox(services_site, receiver) as outbox, signed_in(person, services_site) as (admin, ana):
        one = await outbox.insert()
        await outbox.is_now(one, "failed")
        await outbox.stop()
        receiver.script = lambda request: Reply(201)
        await ana.open(f"/events/{one}")
        await expect(ana.tab.locator("pre.why").first).to_contain_text("503")
        await ana.tab.get_by_role("button", name="Repetir").click()
        await retried(ana, 1)
        assert await admin.state("outbox_events", one) == ("pending", 0)
        await outbox.start()
        assert (await outbox.is_now(one, "sent"))["attempts"] == 1
        assert receiver.counts() == Counter({one: 4})
        await ana.open(f"/events/{one}")
        await expect(ana.tab.locator(".facts .badge")).to_have_text("enviado")


async def test_retry_of_an_event_that_is_being_sent_is_refused_and_it_is_sent_once(
    services_site: Site, person: People, receiver: Receiver
) -> None:
    """The list is a minute old; somebody else was quicker, and the request is on its way (O-41)."""
    receiver.script = lambda request: Reply(503)
    async with (
        Outbox(services_site, receiver, OUTBOX_TIMEOUT_SECONDS="60") as outbox,
        signed_in(person, services_site) as (admin, ana),
    ):
        one = await outbox.insert()
        await outbox.is_now(one, "failed")
        await ana.open("/events")
        await ana.tab.get_by_label(f"Marcar o número {one}").check()
        receiver.script = lambda request: Reply(201)
        receiver.may_answer.clear()
        await outbox.sql("UPDATE outbox_events SET status = 'pending', attempts = 0 WHERE id = :id", id=one)
        await arrived(outbox, receiver, 4)
        await ana.tab.get_by_role("button", name="Repetir os marcados").click()
        await retried(ana, 0)
        await expect(ana.tab.locator("main")).to_contain_text(f"{one}: em andamento, não repetido")
        await ana.open(f"/events/{one}")
        await expect(ana.tab.locator(".note")).to_contain_text("Está sendo enviado agora")
        receiver.may_answer.set()
        await outbox.is_now(one, "sent")
        assert receiver.counts() == Counter({one: 4})
        assert await admin.state("outbox_events", one) == ("sent", 1)


async def arrived(outbox: Outbox, receiver: Receiver, requests: int) -> None:
    """Wait until so many requests have come."""

    def have_come() -> None:
        outbox.check()
        assert len(receiver.requests) == requests

    await eventually(have_come, 60)


async def test_event_that_fails_again_is_open_once_and_then_not_at_all(
    embedded_site: Site, person: People, receiver: Receiver
) -> None:
    """Three failures of the same row are one thing to do (O-43)."""
    receiver.script = lambda request: Reply(503)
    async with Outbox(embedded_site, receiver) as outbox, signed_in(person, embedded_site) as (_, ana):
        one = await outbox.insert()
        for claims in (3, 6, 9):
            await failed_with(outbox, one, claims)
            await ana.open("/letters")
            await expect(ana.tab.locator("tbody tr")).to_have_count(1)
            if claims == 9:
                receiver.script = lambda request: Reply(201)
            await ana.tab.get_by_role("link", name=f"linha {one}").click()
            await ana.tab.get_by_role("button", name="Repetir").click()
            await retried(ana, 1)
        await outbox.is_now(one, "sent")
        await ana.open("/letters")
        await expect(ana.tab.get_by_text("Nenhuma em aberto.")).to_be_visible()
        await ana.open("/letters?every=1")
        await expect(ana.tab.locator("tbody tr")).to_have_count(3)


async def failed_with(outbox: Outbox, event_id: int, claims: int) -> None:
    """Wait until it has failed with so many claims, and its dead letter is there."""

    async def has_failed() -> None:
        outbox.check()
        row = await outbox.event(event_id)
        assert (row["status"], row["claim_no"]) == ("failed", claims)

    await eventually(has_failed, 60)


async def test_mail_that_failed_is_sent_once_after_a_retry(services_site: Site, person: People) -> None:
    """One mail to that person, and none more to the others of the batch."""
    sink = Sink()
    await sink.start()
    try:
        for _ in range(3):
            sink.script("rcpt", reply="451 4.7.1 <b>later</b>", recipient=address(2), times=1)
        async with Job(services_site, sink, BACKOFF_SECONDS="0.1") as job, signed_in(person, services_site) as (_, ana):
            batch = await job.publish(people(3))
            await job.settled(3)
            row = await job.row(2)
            assert row["status"] == "failed"
            await ana.open(f"/batches?batch={batch}")
            await ana.tab.locator("a.failed").click()
            await expect(ana.tab.locator("tbody tr")).to_have_count(1)
            await expect(ana.tab.locator("tbody")).to_contain_text("<b>later</b>")
            await ana.tab.get_by_label(f"Marcar o número {row['id']}").check()
            await ana.tab.get_by_role("button", name="Repetir os marcados").click()
            await retried(ana, 1)
            await job.settled(3)
            assert (await job.row(2))["status"] == "sent"
            assert job.mails() == Counter({address(n): 1 for n in (1, 2, 3)})
            await ana.open(f"/batches?batch={batch}")
            await expect(ana.tab.locator(".batch .badge")).to_have_text("completo")
    finally:
        await sink.stop()
