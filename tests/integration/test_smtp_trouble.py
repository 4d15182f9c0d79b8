"""What the mail server may do to the job: it costs the mails no attempt that is not theirs, and nobody gets two.

On the embedded site where nothing else says: what happens between us and the mail server is the same on both.
"""

import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

from processors._demo.sink import Sink
from streams.testing import eventually
from tests.support.job import Job, address, people, person
from tests.support.sites import Site
from tests.support.tcpproxy import TcpProxy

QUEUED = 500
SLOTS = 8
THRESHOLD = 10


# ---- a connection that was idle


async def test_second_mail_goes_out_at_once_when_the_idle_connection_was_closed_with_421(
    embedded_site: Site, sink: Sink
) -> None:
    """An idle close is no failure of the next mail: one attempt, no back-off, a new connection (O-13)."""
    sink.idle_seconds = 0.2
    async with Job(embedded_site, sink, BACKOFF_SECONDS="60") as job:
        await job.publish([person(1)])
        await job.settled(1)

        def is_closed() -> None:
            assert sink.open_connections == 0

        await eventually(is_closed)
        await job.publish([person(2)])
        await job.settled(2)
        assert await job.attempts() == {address(1): 1, address(2): 1}
        assert sink.connections == 2


async def test_mail_goes_out_at_once_when_421_is_the_answer_to_its_first_command(
    embedded_site: Site, sink: Sink
) -> None:
    """The server wanted to close the idle connection, and our next mail was quicker (O-13)."""
    async with Job(embedded_site, sink, BACKOFF_SECONDS="60") as job:
        await job.publish([person(1)])
        await job.settled(1)
        sink.script("mail", reply="421 4.4.2 idle for too long", times=1)
        await job.publish([person(2)])
        await job.settled(2)
        assert await job.attempts() == {address(1): 1, address(2): 1}
        assert (sink.connections, len(sink.mails)) == (2, 2)


async def test_next_mail_goes_out_when_the_connection_died_without_a_word(embedded_site: Site, sink: Sink) -> None:
    """A firewall has forgotten it: noticed by time-out, replaced, and the mail keeps its attempts (O-18)."""
    async with (
        TcpProxy(sink.port) as proxy,
        Job(embedded_site, sink, SMTP_PORT=proxy.port, BACKOFF_SECONDS="60") as job,
    ):
        await job.publish([person(1)])
        await job.settled(1)
        proxy.freeze()
        await job.publish([person(2)])
        await job.settled(2)
        assert job.mails() == {address(1): 1, address(2): 1}
        assert await job.attempts() == {address(1): 1, address(2): 1}


# ---- temporary refusals


async def test_mail_goes_out_at_the_attempt_that_outlasts_greylisting(embedded_site: Site, sink: Sink) -> None:
    """The second attempt for one, the third for another; nobody else waits for either (O-15)."""
    first = sink.script("rcpt", reply="451 4.7.1 greylisted", recipient=address(1), times=1)
    second = sink.script("rcpt", reply="450 4.7.1 greylisted", recipient=address(2), times=2)
    async with Job(embedded_site, sink, SLOTS=1) as job:
        await job.publish(people(30))
        await job.settled(30)
        assert await job.attempts() == {address(1): 2, address(2): 3, **{address(n): 1 for n in range(3, 31)}}
        assert (first.seen.total(), second.seen.total()) == (2, 3)
        order = [mail.recipients[0] for mail in sink.mails]
        assert order[-2:] == [address(1), address(2)]


# ---- after the final dot


async def test_at_most_three_copies_under_one_id_when_no_reply_follows_the_final_dot(site: Site, sink: Sink) -> None:
    """`resend`: the server has it and never says so. Three attempts, one Message-ID, each doubt counted (O-14)."""
    sink.script("dot", do="reset", recipient=address(1))
    async with Job(site, sink) as job:
        await job.publish(people(2))
        await job.settled(2)
        row = await job.row(1)
        assert (row["status"], row["attempts"], row["doubts"], row["held"]) == ("failed", 3, 3, False)
        copies = [mail.message_id for mail in sink.mails if mail.recipients == (address(1),)]
        assert copies == [row["message_id"]] * 3
        assert (await job.row(2))["doubts"] == 0
        [letter] = await job.dead_letters()
        assert (letter["row_id"], letter["reason"]) == (row["id"], "attempts_used_up")


async def test_one_copy_is_held_for_a_person_when_no_reply_follows_the_final_dot_and_hold_is_set(
    site: Site, sink: Sink
) -> None:
    """`hold`: one copy, failed, listed; the bulk retry at night leaves it alone, a person's own decision does not."""
    sink.script("dot", do="reset", recipient=address(1))
    async with Job(site, sink, ON_UNKNOWN_OUTCOME="hold") as job:
        await job.publish(people(2))
        await job.settled(2)
        row = await job.row(1)
        assert (row["status"], row["attempts"], row["doubts"], bool(row["held"])) == ("failed", 1, 1, True)
        [letter] = await job.dead_letters()
        assert (letter["row_id"], letter["reason"]) == (row["id"], "outcome_unknown")
        seen = await job.status()
        assert (seen.held, seen.in_doubt) == (1, 1)

        again = "UPDATE email_dispatches SET status='pending', attempts=0"
        await job.sql(f"{again} WHERE status='failed' AND NOT held")
        with pytest.raises(Exception, match="pending_never_sent_nor_held"):
            await job.sql(f"{again} WHERE status='failed'")
        assert job.mails() == {address(1): 1, address(2): 1}

        sink.forget()
        await job.sql(f"{again}, held=false WHERE id=:id", id=row["id"])
        await job.settled(2)
        assert job.mails() == {address(1): 2, address(2): 1}


# ---- a fault of the set-up is no fault of 500 recipients


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    """Whom the mailer trusts."""
    return trustme.CA()


@pytest.fixture(scope="session")
def ca_file(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its certificate."""
    path = tmp_path_factory.mktemp("tls") / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


def server_tls(authority: trustme.CA) -> ssl.SSLContext:
    """What a server needs to be trusted by those who trust the authority."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


@pytest.mark.parametrize("fault", ["no STARTTLS", "bad certificate"])
async def test_nothing_is_said_in_clear_and_attempts_are_kept_when_tls_fails(
    embedded_site: Site, sink: Sink, authority: trustme.CA, ca_file: Path, fault: str
) -> None:
    """The breaker opens after a few; when the server is put right, all are sent without anybody's help (O-16)."""
    sink.starttls = None if fault == "no STARTTLS" else server_tls(trustme.CA())
    sink.users = {"afluente": "secret"}
    login = {
        "SMTP_SECURITY": "starttls",
        "SMTP_CA_FILE": ca_file,
        "SMTP_USERNAME": "afluente",
        "SMTP_PASSWORD": "secret",
    }
    async with breaking_job(embedded_site, sink, **login) as job:
        await job.publish(people(QUEUED))
        await keeps_attempts_while_broken(job)
        assert not {verb for verb, _ in sink.commands} & {"AUTH", "MAIL"}
        sink.starttls = server_tls(authority)
        await all_sent_once(job)
        assert {secure for verb, secure in sink.commands if verb in {"AUTH", "MAIL", "RCPT", "DATA"}} == {True}


async def test_attempts_are_kept_when_the_password_is_wrong_for_everybody(site: Site, sink: Sink) -> None:
    """535 is nobody's own: no dead letters for one wrong secret; with the right one all are sent (O-17)."""
    sink.users = {"afluente": "rotated"}
    async with breaking_job(site, sink, SMTP_USERNAME="afluente", SMTP_PASSWORD="secret") as job:
        await job.publish(people(QUEUED))
        await keeps_attempts_while_broken(job)
        assert "MAIL" not in {verb for verb, _ in sink.commands}
        sink.users = {"afluente": "secret"}
        await all_sent_once(job)


def breaking_job(site: Site, sink: Sink, **changes: Any) -> Job:
    """A job of few slots whose breaker opens early; the back-off is over long before the test looks again."""
    return Job(site, sink, SLOTS=SLOTS, BREAKER_THRESHOLD=THRESHOLD, BACKOFF_SECONDS="0.5", **changes)


async def keeps_attempts_while_broken(job: Job) -> None:
    """Wait until the breaker is open, then for three probes: rows wait, and only those before it opened have paid."""

    def is_open() -> None:
        job.check()
        assert job.metric("afluente_breaker_open", processor="mailer") == 1

    await eventually(is_open)
    probes = job.sink.connections + 3

    def has_probed() -> None:
        assert job.sink.connections >= probes

    await eventually(has_probed)

    async def are_planned() -> None:
        assert await job.count("status = 'pending'") == QUEUED

    await eventually(are_planned)
    rows = await job.rows()
    assert {row["attempts"] for row in rows} <= {0, 1}
    assert THRESHOLD <= sum(row["attempts"] for row in rows) <= THRESHOLD + SLOTS
    assert job.mails() == {}


async def all_sent_once(job: Job) -> None:
    """Wait until all are sent; the breaker has closed by itself."""
    await job.settled(QUEUED)
    assert job.mails() == {address(n): 1 for n in range(1, QUEUED + 1)}
    assert await job.count("status = 'sent'") == QUEUED
    assert await job.dead_letters() == []
    assert job.metric("afluente_breaker_open", processor="mailer") == 0


# ---- the provider's own limit


async def test_mails_are_no_faster_than_the_rate_when_one_is_set(embedded_site: Site, sink: Sink) -> None:
    """21 mails at 20 a second take a second at least; the wait costs no attempt."""
    async with Job(embedded_site, sink, SMTP_RATE_PER_SECOND=20) as job:
        began = await job.now()
        await job.publish(people(21))
        await job.settled(21)
        assert max(mail.at for mail in sink.mails) - began >= 20 / 20
        assert set((await job.attempts()).values()) == {1}
