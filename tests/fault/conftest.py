"""Fixtures for what goes wrong between us and the services."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
import uvloop

from tests.conftest import Services
from tests.support.rabbit import Rabbit, rabbit_behind_proxy
from tests.support.sites import embedded_site, migrated, services_site, sink, site

__all__ = ["embedded_site", "migrated", "rabbit", "services_site", "sink", "site"]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Callable[[], Any]]:
    """Faults of connections are met on uvloop, as in production; its sockets fail in other ways than asyncio's."""
    loops: dict[str, Callable[[], Any]] = {}
    if item.path.name.startswith("test_rabbitmq"):
        loops["uvloop"] = uvloop.new_event_loop
    if item.path.name == "test_rabbitmq_publish.py" or not loops:
        loops["asyncio"] = asyncio.new_event_loop
    return loops


@pytest.fixture
async def rabbit(broker: Services) -> AsyncIterator[Rabbit]:
    """The broker behind a proxy that does to connections what networks do."""
    async with rabbit_behind_proxy(broker) as rabbit:
        yield rabbit
