"""The example of docs/adding-a-processor.md, as it stands there: it is executed, so that it can be copied."""

from pathlib import Path
from typing import Any

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection

from processors._migrate import migrate
from streams.database import connect
from tests.house.tree import ROOT
from tests.support.documents import blocks

PAGE = ROOT / "docs/adding-a-processor.md"


@pytest.fixture
def example() -> dict[str, Any]:
    """The names that the blocks of the page define, one after the other."""
    names: dict[str, Any] = {"__name__": "example"}
    for block in blocks(PAGE, "python"):
        exec(compile(block.text, f"{PAGE.name}: {block.heading}", "exec"), names)
    return names


async def test_the_example_sends_each_number_one_text_whatever_comes_twice(
    example: dict[str, Any], tmp_path: Path
) -> None:
    """A list comes twice and one send fails once: each number gets one text, by the statements of the page alone."""
    url = f"sqlite+aiosqlite:///{tmp_path / 'example.db'}"
    await migrate(url)
    engine = connect(url, "example")

    def upgrade(connection: Connection) -> None:
        with Operations.context(MigrationContext.configure(connection)):
            example["upgrade"]()

    async with engine.begin() as connection:
        await connection.run_sync(upgrade)
    assert await example["try_it"](engine) == ["+5585000000001", "+5585000000009"]
    await engine.dispose()
