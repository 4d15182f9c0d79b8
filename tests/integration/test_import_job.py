"""The import job from a published list to the mail server, on both sites: each person's e-mail comes out once."""

import pytest

from processors._demo.sink import Sink
from tests.support.job import Job, address, people
from tests.support.sites import Site


@pytest.mark.parametrize(("size", "failing"), [(5, 3), (3, 2)])
async def test_only_the_failed_mail_is_tried_again_when_one_send_of_a_batch_fails(
    site: Site, sink: Sink, size: int, failing: int
) -> None:
    """What the old consumer got wrong: those before the failure got their mail again, those behind it none."""
    refusal = sink.script("dot", reply="451 4.3.0 try again later", recipient=address(failing), times=1)
    async with Job(site, sink) as job:
        batch = await job.publish(people(size))
        await job.settled(size)
        assert job.mails() == {address(n): 1 for n in range(1, size + 1)}
        assert await job.attempts() == {address(n): 1 + (n == failing) for n in range(1, size + 1)}
        assert refusal.seen.total() == 2
        assert (await job.batch(batch)).sent == size
