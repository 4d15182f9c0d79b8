"""The tables as Laravel's migrations made them on each database, and rows as the old code inserted them."""

import json
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from streams.database import dialect

IMPORT = "App\\Mail\\ImporteRegistrationMail"
OTHER = "App\\Mail\\PublishedRecoursesMail"

TABLES = {
    "postgresql": [
        """CREATE TABLE email_dispatches (id bigserial PRIMARY KEY, "to" varchar(255) NOT NULL,
           subject varchar(255) NOT NULL, content text NOT NULL, mailable_type varchar(255) NOT NULL, meta json,
           dispatched_at timestamp(0) without time zone NOT NULL, created_at timestamp(0) without time zone,
           updated_at timestamp(0) without time zone)""",
        """CREATE TABLE audits (id bigserial PRIMARY KEY, user_type varchar(255), user_id bigint,
           event varchar(255) NOT NULL, auditable_type varchar(255) NOT NULL, auditable_id bigint NOT NULL,
           old_values text, new_values text, url text, ip_address inet, user_agent varchar(1023), tags varchar(255),
           created_at timestamp(0) without time zone, updated_at timestamp(0) without time zone)""",
    ],
    "sqlite": [
        """CREATE TABLE "email_dispatches" ("id" integer primary key autoincrement not null, "to" varchar not null,
           "subject" varchar not null, "content" text not null, "mailable_type" varchar not null, "meta" text,
           "dispatched_at" datetime not null, "created_at" datetime, "updated_at" datetime)""",
        """CREATE TABLE "audits" ("id" integer primary key autoincrement not null, "user_type" varchar,
           "user_id" integer, "event" varchar not null, "auditable_type" varchar not null,
           "auditable_id" integer not null, "old_values" text, "new_values" text, "url" text, "ip_address" varchar,
           "user_agent" varchar, "tags" varchar, "created_at" datetime, "updated_at" datetime)""",
    ],
}
INDEXES = [
    "CREATE INDEX audits_user_id_user_type_index ON audits (user_id, user_type)",
    "CREATE INDEX audits_auditable_type_auditable_id_index ON audits (auditable_type, auditable_id)",
]
INSERT = """INSERT INTO email_dispatches
("to", subject, content, mailable_type, meta, dispatched_at, created_at, updated_at)
VALUES (:to, 'Inscrição importada', '<p>Olá</p>', :mailable, {meta}, {time}, {time}, {time}) RETURNING id"""


async def create_legacy_tables(engine: AsyncEngine) -> None:
    """Create both tables, empty."""
    async with engine.begin() as connection:
        for statement in (*TABLES[dialect(engine)], *INDEXES):
            await connection.execute(text(statement))


def registration(opp_id: object = 7301, registration: object = 1, agent_email: object = "ana@example.com") -> str:
    """`meta` as the old import wrote it."""
    return json.dumps({"opp_id": opp_id, "registration": registration, "agent_email": agent_email})


async def insert(
    engine: AsyncEngine, meta: str | None, *, to: str = "ana@example.com", mailable: str = IMPORT,
    at: str = "2026-03-29 02:30:00",
) -> int:  # fmt: skip
    """Insert a row as the old code does, which knows no new column. Answers its id."""
    postgresql = dialect(engine) == "postgresql"
    statement = INSERT.format(
        meta="CAST(CAST(:meta AS text) AS json)" if postgresql else ":meta",
        time="CAST(CAST(:at AS text) AS timestamp)" if postgresql else ":at",
    )
    async with engine.begin() as connection:
        found = await connection.execute(text(statement), {"to": to, "mailable": mailable, "meta": meta, "at": at})
        return int(found.scalar_one())


async def query(engine: AsyncEngine, statement: str, **values: Any) -> list[dict[str, Any]]:
    """Run one statement in a transaction of its own; its rows as dicts."""
    async with engine.begin() as connection:
        result = await connection.execute(text(statement), values)
        return [dict(row) for row in result.mappings()] if result.returns_rows else []
