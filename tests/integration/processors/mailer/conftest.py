"""The tests of sockets run on both event loops that the mailer may run on."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import uvloop


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Callable[[], Any]]:
    """asyncio's own loop and uvloop differ in what their transports do with a write."""
    loops: dict[str, Callable[[], Any]] = {"asyncio": asyncio.new_event_loop}
    if item.path.name == "test_smtp.py":
        loops["uvloop"] = uvloop.new_event_loop
    return loops
