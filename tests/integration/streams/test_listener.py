"""NOTIFY as the relays of a process hear it: on one connection, which comes back, and is let go of with the last."""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from streams.database import connect
from streams.listener import CHANNEL, Listener
from streams.testing import eventually
from tests.support.databases import query

SESSIONS = """SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND query LIKE 'LISTEN %'"""


async def listening(engine: AsyncEngine, there: bool = True) -> list[int]:
    """Wait until one session listens, or none; answers its pid."""

    async def look() -> list[int]:
        found = [row["pid"] for row in await query(engine, SESSIONS)]
        assert len(found) == int(there)
        return found

    return await eventually(look)


async def wakes(engine: AsyncEngine, about: str, *events: asyncio.Event) -> None:
    """A NOTIFY of this sets all these events."""
    await query(engine, f"NOTIFY {CHANNEL}, '{about}'")
    async with asyncio.timeout(20):
        await asyncio.gather(*(event.wait() for event in events))


async def test_each_is_woken_by_what_is_meant_for_it(postgres: AsyncEngine) -> None:
    """Its own table, or nothing said, which is meant for all."""
    listener, mails, events = Listener(postgres), asyncio.Event(), asyncio.Event()
    listener.add(mails, "email_dispatches")
    listener.add(events, "outbox_events")
    await listening(postgres)
    await wakes(postgres, "outbox_events", events)
    assert not mails.is_set()
    events.clear()
    await wakes(postgres, "", events, mails)
    listener.remove(mails)
    await listening(postgres)
    listener.remove(events)
    await listening(postgres, there=False)


async def test_listening_begins_anew_when_the_session_was_cut(postgres: AsyncEngine) -> None:
    """After a restart of the database or a failover; meanwhile the relay polls."""
    listener, wake = Listener(postgres), asyncio.Event()
    listener.add(wake, "outbox_events")
    [pid] = await listening(postgres)
    await query(postgres, f"SELECT pg_terminate_backend({pid})")

    async def another() -> None:
        assert await listening(postgres) != [pid]

    await eventually(another)
    await wakes(postgres, "outbox_events", wake)
    listener.remove(wake)
    await listening(postgres, there=False)


async def test_listening_begins_at_last_when_it_was_refused_at_first(postgres: AsyncEngine) -> None:
    """Also for a reason that is no absence, such as a role that may not log in yet: said once, and tried again."""
    role = f"relay_{uuid.uuid4().hex[:12]}"
    await query(postgres, f"CREATE ROLE {role} NOLOGIN")
    engine = connect(postgres.url.set(username=role).render_as_string(hide_password=False), "listener")
    listener, wake = Listener(engine), asyncio.Event()
    try:
        with capture_logs() as logs:
            listener.add(wake, "outbox_events")
            await eventually(lambda: said(logs))
            await query(postgres, f"ALTER ROLE {role} LOGIN")
            await listening(postgres)
        await wakes(postgres, "outbox_events", wake)
        assert len(said(logs)) == 1
    finally:
        listener.remove(wake)
        await listening(postgres, there=False)
        await engine.dispose()
        await query(postgres, f"DROP ROLE {role}")


def said(logs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The warnings that nothing is heard, at least one."""
    found = [line for line in logs if line["event"] == "relay.not_listening"]
    assert found
    return found
