"""The fixtures of the contract suite: every test runs once per log."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from streams.log import Log, Partition
from tests.contract.places import EmbeddedPlace, MemoryPlace, Place, RabbitPlace


@pytest.fixture(params=["memory", "embedded", "rabbitmq"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """A store for one test; `-k embedded` and the like choose one."""
    places: dict[str, Callable[[], Place]] = {
        "memory": MemoryPlace,
        "embedded": lambda: EmbeddedPlace(tmp_path),
        "rabbitmq": lambda: RabbitPlace(request.getfixturevalue("broker")),
    }
    chosen = places[request.param]()
    yield chosen
    await chosen.clear()


@pytest.fixture
async def log(place: Place) -> Log:
    """An opened log on that store."""
    return await place.connect()


@pytest.fixture
async def partition(place: Place, log: Log) -> Partition:
    """The only partition of a plain stream that nobody has written to."""
    return (await place.new_stream(log))[0]
