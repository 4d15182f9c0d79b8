"""Fixtures for what goes wrong between us and the services."""

from collections.abc import AsyncIterator

import pytest

from tests.conftest import Services
from tests.support.rabbit import Rabbit, rabbit_behind_proxy


@pytest.fixture
async def rabbit(broker: Services) -> AsyncIterator[Rabbit]:
    """The broker behind a proxy that does to connections what networks do."""
    async with rabbit_behind_proxy(broker) as rabbit:
        yield rabbit
