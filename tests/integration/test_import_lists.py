"""What a published list may hold, and what becomes of it: the unit of failure is the recipient, never the list."""

import json
from email import message_from_bytes
from email.header import decode_header, make_header
from email.utils import getaddresses

import pytest
import structlog

from processors._demo.sink import Sink
from streams.testing import eventually
from tests.support.job import Job, address, bare, people, person
from tests.support.sites import Site


async def test_batch_of_zero_is_complete_when_the_list_is_empty(site: Site, sink: Sink) -> None:
    """No dead letter, no error, no state for ever undefined; the next list is handled as ever (O-04)."""
    async with Job(site, sink) as job:
        empty = await job.publish([])
        batch = await job.publish(people(3))
        await job.settled(3)
        seen = await job.batch(empty)
        assert (seen.total, seen.waiting, seen.complete, seen.times_received) == (0, 0, True, 1)
        assert (await job.batch(batch)).sent == 3
        assert await job.dead_letters() == []


async def test_the_others_are_mailed_when_three_of_a_thousand_cannot_be(
    site: Site, sink: Sink, caplog: pytest.LogCaptureFixture
) -> None:
    """Each bad one is a dead letter with its index and reason; nobody is named in those or in the log (O-05)."""
    items = people(1000)
    del items[499]["agent_email"]
    items[699]["agent_email"] = None
    items[799]["agent_email"] = {}
    with structlog.testing.capture_logs() as lines:
        async with Job(site, sink) as job:
            batch = await job.publish(items)
            await job.settled(997)
            letters = await job.dead_letters()
            seen = await job.batch(batch)
    assert (seen.total, seen.sent, seen.rejected, seen.waiting) == (1000, 997, 3, 0)
    assert set(job.mails().values()) == {1}
    assert [(d["batch_id"], d["item_index"], d["reason"]) for d in letters] == [
        (batch, index, "invalid_registration") for index in (499, 699, 799)
    ]
    assert [d["error"].split()[0] for d in letters] == ["agent_email"] * 3
    assert [json.loads(d["body"]) for d in letters] == [items[index] for index in (499, 699, 799)]
    words = json.dumps([lines, [d["error"] for d in letters]], default=str) + caplog.text
    assert "@" not in words
    assert "Pessoa" not in words


async def test_key_decides_and_not_the_address_when_two_registrations_have_one_e_mail(site: Site, sink: Sink) -> None:
    """Two registrations of Ana: two mails. The first one repeated byte for byte: none, and a duplicate (O-06)."""
    ana = {"agent_email": "ana@example.com"}
    async with Job(site, sink) as job:
        batch = await job.publish([person(1, **ana), person(2, **ana), person(1, **ana)])
        await job.settled(2)
        assert job.mails() == {"ana@example.com": 2}
        seen = await job.batch(batch)
        assert (seen.total, seen.sent, seen.duplicate, seen.failed) == (3, 2, 1, 0)


async def test_number_and_its_digits_are_one_key_and_other_forms_are_refused(site: Site, sink: Sink) -> None:
    """42 and "42" are the same; what only looks like it is a dead letter, never trimmed. Once more: no mail (O-07)."""
    forms = [42, "42", "042", "42 ", "\u00e9-1", "e\u0301-1", 42.0, True]
    items = [person(1, registration=form) for form in forms]
    async with Job(site, sink) as job:
        batch = await job.publish(items)
        await job.settled(1)
        seen = await job.batch(batch)
        assert (seen.total, seen.sent, seen.duplicate, seen.rejected) == (8, 1, 1, 6)
        assert [d["item_index"] for d in await job.dead_letters()] == [2, 3, 4, 5, 6, 7]
        await job.publish(items)
        await eventually(lambda: job.received(batch, times=2))
        await job.caught_up()
        assert job.mails() == {address(1): 1}
        assert len(await job.dead_letters()) == 6


@pytest.mark.parametrize("name", ["Davis, Sam (Jr.)", "\u00c6sa \u00d8deg\u00e5rd \U0001f389 " * 10 + "Silva"])
async def test_name_arrives_as_it_is_when_it_holds_commas_or_foreign_letters(
    embedded_site: Site, sink: Sink, name: str
) -> None:
    """One mailbox of that name in To, its bare address at RCPT, the subject untouched; no SMTPUTF8 needed (O-08, O-09).

    The bytes of a mail know nothing of where they come from: one site is enough.
    """
    async with Job(embedded_site, sink) as job:
        await job.publish([person(1, agent_name=name)])
        await job.settled(1)
        subject = (await job.row(1))["subject"]
    [mail] = sink.mails
    assert mail.recipients == (address(1),)
    assert max(map(len, mail.raw.split(b"\r\n"))) <= 78
    message = message_from_bytes(mail.raw)  # the newer parser of the email package puts blanks between encoded words
    [(shown, mailbox)] = getaddresses(message.get_all("To", []))
    assert (str(make_header(decode_header(shown))), mailbox) == (name, address(1))
    assert str(make_header(decode_header(message["Subject"]))) == subject


async def test_nobody_else_is_mailed_when_an_address_holds_commands_or_repaired_would_be_another(
    site: Site, sink: Sink
) -> None:
    """Eve gets nothing, nor does whoever has the address without its odd dots; each is refused, the others go on."""
    bad = [
        "sam@example.com\n",
        "sam@example.com\r\nRCPT TO:<eve@example.com>",
        "sam@example.com\u0000",
        "sam@example.com, eve@example.com",
        "try..this@example.jp",
        "ana.@example.com",
    ]
    items = [person(number, agent_email=text) for number, text in enumerate(bad, 10)]
    async with Job(site, sink) as job:
        batch = await job.publish([person(1), *items, person(2)])
        await job.settled(2)
        assert job.mails() == {address(1): 1, address(2): 1}
        assert (await job.batch(batch)).rejected == len(bad)
        letters = await job.dead_letters()
        assert [d["item_index"] for d in letters] == list(range(1, 1 + len(bad)))
        assert not [d["error"] for d in letters if "@" in d["error"]]


BROKEN = {
    "not_json": [
        b'[{"email":"ana@example.com","amount":NaN}]',
        b'[{"email":"ana@example.com","amount":-Infinity}]',
        b'[{"email":"ana@example.com","amount":1e400}]',
        b"[",
    ],
    "undecodable": [b""],
    "byte_order_mark": [b'\xef\xbb\xbf[{"email":"ana@example.com","key":"r-1"}]'],
    "not_utf8": [b'[{"name":"Jos\xe9","email":"jose@example.com","key":"r-2"}]'],
    "not_an_array": [b'{"email":"ana@example.com"}', b"null"],
}


async def test_broken_body_is_one_dead_letter_with_its_bytes_when_any_client_writes_it(site: Site, sink: Sink) -> None:
    """Nothing is half taken, nothing is tried for ever, and the list behind it is mailed (O-01, O-02, O-03)."""
    bodies = [(reason, body) for reason, broken in BROKEN.items() for body in broken]
    async with Job(site, sink) as job:
        await job.put(*(bare(body) for _, body in bodies), bare(json.dumps(people(1)).encode()))
        await job.settled(1)
        letters = await job.dead_letters()
        assert [(d["reason"], d["body"]) for d in letters] == [(reason, bare(body)) for reason, body in bodies]
        assert [d["source_offset"] for d in letters] == list(range(len(bodies)))
        assert job.mails() == {address(1): 1}
        assert not [d["error"] for d in letters if "@" in d["error"]]


async def test_fifty_thousand_are_split_once_each_when_they_come_in_one_list(site: Site, sink: Sink) -> None:
    """One list of 9 MB: many slices, one batch, one message per registration (mailing them would show nothing new)."""
    async with Job(site, sink, processors=["splitter"]) as job:
        batch = await job.publish(people(50_000))
        await eventually(lambda: is_whole(job, batch), timeout=60)
        keys = [message.id for message in await job.recipients()]
        assert len(keys) == len(set(keys)) == 50_000


async def is_whole(job: Job, batch: str) -> None:
    """All of the batch has been split, and counted."""
    job.check()
    rows = await job.sql("SELECT total, received, valid FROM import_batches WHERE batch_id = :batch", batch=batch)
    assert [tuple(row.values()) for row in rows] == [(50_000, 50_000, 50_000)]
