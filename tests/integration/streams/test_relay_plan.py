"""How PostgreSQL finds what is due: by an index, however many events there are and whatever they wait for."""

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from processors.sync.processor import TABLE
from streams.database import driver_connection
from streams.processor import Limits
from streams.rows import Rows
from tests.support.databases import query

ROWS = Rows(TABLE, Limits(), "postgresql")
EVENTS = {"sent": "'sent', NULL", "queued": "'pending', now() + interval '60 s'"}


async def plan_of(engine: AsyncEngine, statement: str) -> str:
    """As it is planned again and again for any parameter."""
    async with driver_connection(engine) as connection:
        await connection.execute("SET plan_cache_mode = force_generic_plan")
        await connection.execute(f"PREPARE it AS {statement}")
        lines = await connection.fetch("EXPLAIN EXECUTE it (500)")
        await connection.execute("DEALLOCATE it")
        return "\n".join(line[0] for line in lines)


@pytest.mark.parametrize("analysed", [True, False])
@pytest.mark.parametrize("others", EVENTS)
async def test_due_events_are_found_by_an_index_when_there_are_thousands_of_others(
    postgres: AsyncEngine, others: str, analysed: bool
) -> None:
    """One new event beside 5,000 that are sent or under way; and those that may have to be published again."""
    await query(postgres, "ALTER TABLE outbox_events SET (autovacuum_enabled = off)")
    for state, count in ((EVENTS[others], 5000), ("'pending', NULL", 1)):
        await query(
            postgres,
            f"""INSERT INTO outbox_events (event_name, payload, status, queued_until)
            SELECT 'e', jsonb_build_object('n', n), {state} FROM generate_series(1, {count}) AS n""",
        )
    if analysed:
        async with postgres.connect() as connection:
            await (await connection.execution_options(isolation_level="AUTOCOMMIT")).execute(text("ANALYZE"))
    reserve, expired = await plan_of(postgres, ROWS._reserve), await plan_of(postgres, ROWS._expired)
    assert "Seq Scan on outbox_events" not in reserve, reserve
    assert "Index Scan using ix_outbox_events_waiting" in reserve, reserve
    assert "Seq Scan on outbox_events" not in expired, expired
    assert "ix_outbox_events_queued" in expired, expired
