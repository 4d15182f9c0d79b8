"""A queue and a stream of one's own for tests of intake and of the commands about its queues."""

from collections.abc import AsyncIterator

import pytest

from tests.conftest import Services
from tests.support.amqp import Stage, new_stage


@pytest.fixture
async def stage(services: Services) -> AsyncIterator[Stage]:
    """See `Stage`."""
    async with new_stage(services) as stage:
        yield stage
