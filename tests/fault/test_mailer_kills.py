"""Pods that are killed or stopped in the middle of sending: nothing is lost, and who may have got two is listed.

Services: two mailers share the partitions, and the other one takes over. The embedded log allows one set of processors,
so there the pod is started again. Times are short, all by settings: a claim lasts 5 s.
"""

from collections import Counter

import pytest

from processors._demo.sink import Sink
from streams.exit_codes import ExitCode
from streams.testing import eventually
from tests.support.job import Looks, address, people, seconds
from tests.support.pod import Pod
from tests.support.sites import Site

COUNT = 40
SLOTS = 4
SLOW = {"SLOTS": SLOTS, "REPLY_TIMEOUT_SECONDS": "2.5"}


def answer_slowly(sink: Sink) -> None:
    """The first mails are kept at once and answered late: whoever sends them then is in mid-send."""
    sink.script("dot", delay=1.0, times=3 * SLOTS)


def pod(looks: Looks, *processors: str, **more: str) -> Pod:
    """A process with the settings of the job, plus what is in `more`."""
    return Pod(looks.site.folder, looks.environment | more, *processors)


async def reads(looks: Looks) -> None:
    """Wait until a mailer has got its partitions."""

    async def has_positions() -> None:
        [row] = await looks.sql("SELECT count(*) AS n FROM processor_offsets WHERE processor = 'mailer'")
        assert row["n"] == looks.settings.recipients_partitions

    await eventually(has_positions)


async def disconnected(sink: Sink) -> None:
    """Wait until the mail server has read all that a dead process had written."""

    def has_none() -> None:
        assert sink.open_connections == 0

    await eventually(has_none)


async def nothing_is_lost(looks: Looks, repeats: int) -> None:
    """Wait for the end: all are sent, so many at most twice, and each of those is found by the query for doubts."""
    await looks.settled(COUNT)
    assert await looks.count("status = 'sent'") == COUNT
    mails = looks.mails()
    assert set(mails) == {address(n) for n in range(1, COUNT + 1)}
    assert mails.total() - COUNT <= repeats
    listed = {row["to"] for row in await looks.rows() if row["doubts"] > 0}
    assert {to for to, count in mails.items() if count > 1} <= listed
    assert len(listed) <= repeats


async def nobody_gets_two(looks: Looks) -> None:
    """Wait for the end: sent, or held for a person with its dead letter; nobody got two mails."""
    await looks.settled(COUNT)
    assert set(looks.mails().values()) == {1}
    held = [row for row in await looks.rows() if row["held"]]
    assert 1 <= len(held) <= SLOTS
    assert await looks.count("status = 'sent'") == COUNT - len(held)
    letters = await looks.dead_letters()
    assert {d["row_id"] for d in letters} == {row["id"] for row in held}
    assert {d["reason"] for d in letters} == {"outcome_unknown"}


# ---- two mailers


@pytest.mark.parametrize("on_unknown", ["resend", "hold"])
async def test_the_other_mailer_sends_the_rest_when_one_is_killed_in_mid_send(
    services_site: Site, sink: Sink, on_unknown: str
) -> None:
    """SIGKILL between the final dot and the reply: at most the slots are in doubt, listed; `hold` repeats none."""
    answer_slowly(sink)
    async with (
        Looks(services_site, sink, ON_UNKNOWN_OUTCOME=on_unknown, **SLOW) as looks,
        pod(looks, "mailer") as first,
    ):
        await reads(looks)
        async with pod(looks):
            await looks.publish(people(COUNT))
            await sink.wait_for(2 * SLOTS)
            await first.kill()
            if on_unknown == "resend":
                await nothing_is_lost(looks, repeats=SLOTS)
                assert await looks.count("doubts > 0") >= 1
            else:
                await nobody_gets_two(looks)


async def test_the_other_mailer_sends_the_rest_when_one_is_stopped_in_mid_send(services_site: Site, sink: Sink) -> None:
    """SIGTERM, as at every deploy: what is in flight is finished and recorded, and nobody gets two."""
    answer_slowly(sink)
    async with Looks(services_site, sink, **SLOW) as looks, pod(looks, "mailer") as first:
        await reads(looks)
        async with pod(looks):
            await looks.publish(people(COUNT))
            await sink.wait_for(2 * SLOTS)
            await first.terminate()
            assert await first.ended() == ExitCode.OK
            await nothing_is_lost(looks, repeats=0)


# ---- one pod, started again


async def test_nobody_gets_two_when_the_only_pod_is_killed_in_mid_send_and_hold_is_set(
    embedded_site: Site, sink: Sink
) -> None:
    """The same on the embedded log: what the dead process had claimed is held, the rest is sent."""
    answer_slowly(sink)
    async with Looks(embedded_site, sink, ON_UNKNOWN_OUTCOME="hold", **SLOW) as looks:
        await looks.publish(people(COUNT))
        async with pod(looks) as first:
            await sink.wait_for(SLOTS)
            await first.kill()
        async with pod(looks):
            await nobody_gets_two(looks)


async def test_mails_under_way_are_finished_and_none_is_begun_when_the_pod_is_stopped(
    embedded_site: Site, sink: Sink
) -> None:
    """A grace period that is long enough: exit code 0, every mail at the server is recorded, offsets too (O-44)."""
    answer_slowly(sink)
    async with Looks(embedded_site, sink, **SLOW) as looks:
        await looks.publish(people(COUNT))
        async with pod(looks) as first:
            await sink.wait_for(SLOTS)
            await first.terminate()
            await first.logged("process.stopping")
            begun = Counter(verb for verb, _ in sink.commands)["MAIL"]
            assert await first.ended() == ExitCode.OK
        assert Counter(verb for verb, _ in sink.commands)["MAIL"] == begun
        assert await looks.count("status = 'sent'") == len(sink.mails) == begun
        assert await looks.count("lease_until IS NOT NULL") == 0
        async with pod(looks):
            await nothing_is_lost(looks, repeats=0)


async def test_policy_for_unknown_outcomes_applies_when_the_grace_period_is_too_short(
    embedded_site: Site, sink: Sink
) -> None:
    """The stop is cut short and says so by its exit code; the next pod treats it like a kill: two for nobody (O-44)."""
    answer_slowly(sink)
    settings = {**SLOW, "ON_UNKNOWN_OUTCOME": "hold", "SHUTDOWN_GRACE_SECONDS": "0.2"}
    async with Looks(embedded_site, sink, **settings) as looks:
        await looks.publish(people(COUNT))
        async with pod(looks) as first:
            await sink.wait_for(SLOTS)
            await first.terminate()
            assert await first.ended() == ExitCode.GRACE_OVER
        async with pod(looks):
            await nobody_gets_two(looks)


# ---- kill after kill


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("site", "limit", "delay"), [("embedded", 1, 0.02), ("services", 4, 0.05)], indirect=["site"])
async def test_each_kill_repeats_at_most_the_in_doubt_limit_when_five_follow_one_another(
    site: Site, sink: Sink, limit: int, delay: float
) -> None:
    """200 mails, 5 kills in mid-send: more slots than the limit, and yet no more mails between dot and commit.

    Each limit on one site: the limit is the process's own, the other site would add nothing.
    """
    count, slots = 200, 8
    sink.script("dot", delay=delay)
    settings = {"SLOTS": slots, "IN_DOUBT_LIMIT": limit, "MAX_ATTEMPTS": 9}
    async with Looks(site, sink, **settings) as looks:
        await looks.publish(people(count))
        unrecorded = 0
        for _ in range(5):
            async with pod(looks) as killed:
                await sink.wait_for(len(sink.mails) + 25, 20)
                await killed.kill()
            await disconnected(sink)
            before, unrecorded = unrecorded, len(sink.mails) - await looks.count("status = 'sent'")
            assert unrecorded - before <= limit
        async with pod(looks):
            await looks.settled(count)
        mails, rows = looks.mails(), await looks.rows()
        assert await looks.count("status = 'sent'") == count
        assert mails.total() - count == unrecorded
        assert {to for to, n in mails.items() if n > 1} <= {row["to"] for row in rows if row["doubts"] > 0}
        assert sum(row["claim_no"] for row in rows) - count <= 5 * slots
        assert all(row["claim_no"] == row["attempts"] == 1 + row["doubts"] for row in rows)


# ---- where the pod lives


async def test_times_are_utc_and_waits_are_real_when_pod_and_database_live_in_other_zones(
    site: Site, sink: Sink
) -> None:
    """A pod in Paris, a database in New York, on SQLite in Paris as well (O-30)."""
    sink.script("rcpt", reply="451 4.7.1 later", times=1)
    async with Looks(site, sink) as looks:
        if site.kind == "services":
            [database] = await looks.sql("SELECT current_database() AS name")
            await looks.sql(f"ALTER DATABASE {database['name']} SET timezone = 'America/New_York'")
        began = await looks.now()
        await looks.publish(people(1))
        async with pod(looks, TZ="Europe/Paris"):
            await looks.settled(1)
        row = await looks.row(1)
        ended = await looks.now()
        assert (row["status"], row["attempts"]) == ("sent", 2)
        for name in ("created_at", "updated_at", "dispatched_at"):  # Laravel's columns hold whole seconds
            assert began - 1 <= seconds(row[name]) <= ended + 1, name
        assert began + 0.3 <= seconds(row["sent_at"]) <= ended
        assert b"+0000\r\n" in sink.mails[0].raw
