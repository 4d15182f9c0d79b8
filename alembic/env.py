"""How alembic gets its connection: from `processors._migrate`, or for its own commands from DATABASE_URL."""

import asyncio
import os

from alembic import context
from sqlalchemy import Connection

from models.tables import metadata
from streams.database import connect


def run(connection: Connection) -> None:
    """Run what was asked for, each revision in its own transaction (SQLite can do that for DDL too)."""
    context.configure(
        connection=connection,
        target_metadata=metadata,
        transaction_per_migration=True,
        transactional_ddl=True,
        render_as_batch=connection.dialect.name == "sqlite",
    )
    with context.begin_transaction():
        context.run_migrations()


async def run_alone(url: str) -> None:
    """Run without the lock: for people at work on a revision."""
    engine = connect(url, "afluente-alembic")
    try:
        async with engine.connect() as connection:
            await connection.run_sync(run)
    finally:
        await engine.dispose()


if context.is_offline_mode():
    raise SystemExit("The revisions look at the database before they act; --sql cannot work.")

given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    asyncio.run(run_alone(os.environ["DATABASE_URL"]))
