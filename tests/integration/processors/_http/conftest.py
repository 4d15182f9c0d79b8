"""The tests of sockets run on both event loops that sync may run on."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import uvloop


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Callable[[], Any]]:
    """Connections break in other ways on uvloop than on asyncio's own loop."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
