"""The outbox: a table into which any application inserts (event_name, payload), with its triggers.

The triggers audit changes of state, refuse a DELETE in mid-send, and wake the relay. Not audited: an INSERT, since who
may only insert into this table needs no right to another one; and that the engine has sent a row that it had claimed.
The row itself says both, and to write the latter down again was half of the database's work for an event.

Downgrade: stop the engine first. Drops the table with its rows, since the older schema has no place for them: export
what is not sent. Audits stay.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True)
JSON = sa.JSON().with_variant(JSONB(), "postgresql")
AUDITED = ("status", "attempts", "claim_no", "doubts", "held", "last_error")
TYPE = r"App\Models\OutboxEvent"
INTO = "INSERT INTO audits (event, auditable_type, auditable_id, old_values, new_values, tags, created_at, updated_at)"
NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now')"


def upgrade() -> None:
    postgresql = op.get_bind().dialect.name == "postgresql"
    create_table(postgresql)
    op.create_index("ix_outbox_events_status_created_at", "outbox_events", ["status", "created_at"])
    op.create_index("ix_outbox_events_event_name", "outbox_events", ["event_name"])
    op.execute(
        "CREATE INDEX ix_outbox_events_due ON outbox_events "
        "(coalesce(queued_until, next_attempt_at, created_at)) WHERE status = 'pending'"
    )
    for statement in postgresql_triggers() if postgresql else sqlite_triggers():
        op.get_bind().exec_driver_sql(statement)


def downgrade() -> None:
    op.drop_table("outbox_events")  # its triggers go with it
    if op.get_bind().dialect.name == "postgresql":
        for function in ("audit", "delete_guard", "wake_relay"):
            op.execute(f"DROP FUNCTION outbox_events_{function}()")


def create_table(postgresql: bool) -> None:
    clock = "now()" if postgresql else f"({NOW})"
    kind = "jsonb_typeof" if postgresql else "json_type"
    op.create_table(
        "outbox_events",
        sa.Column("id", ID, primary_key=True, autoincrement=True),
        sa.Column("event_name", sa.Text, nullable=False),
        sa.Column("payload", JSON, nullable=False),
        sa.Column("status", sa.Text, nullable=False, server_default="pending"),
        number("attempts"),
        sa.Column("last_error", sa.Text),
        sa.Column("sent_at", TIME),
        sa.Column("traceparent", sa.Text),
        sa.Column("created_at", TIME, nullable=False, server_default=sa.text(clock)),
        sa.Column("updated_at", TIME, nullable=False, server_default=sa.text(clock)),
        sa.Column("next_attempt_at", TIME),
        number("claim_no", sa.BigInteger),
        sa.Column("lease_until", TIME),
        sa.Column("queued_until", TIME),
        number("doubts"),
        sa.Column("held", sa.Boolean, nullable=False, server_default=sa.false()),
        check("status", "status IN ('pending', 'sent', 'failed')"),
        check("pending_never_sent_nor_held", "status <> 'pending' OR (sent_at IS NULL AND NOT held)"),
        check("event_name", "event_name <> ''"),
        check("payload", f"{kind}(payload) = 'object'"),
        sqlite_autoincrement=True,
    )


def number(name: str, kind: type[sa.Integer] = sa.Integer) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False, server_default="0")


def check(name: str, rule: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(rule, name=op.f(f"ck_outbox_events_{name}"))


# ---- PostgreSQL


def postgresql_triggers() -> list[str]:
    return [
        postgresql_audit(),
        """CREATE OR REPLACE FUNCTION outbox_events_delete_guard() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            RAISE EXCEPTION 'outbox_events row % is being sent until %; delete it later', OLD.id, OLD.lease_until
                USING ERRCODE = 'object_in_use';
        END $$""",
        """CREATE OR REPLACE FUNCTION outbox_events_wake_relay() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pg_notify('afluente_relay', 'outbox_events');
            RETURN NULL;
        END $$""",
        """CREATE OR REPLACE TRIGGER outbox_events_audit_update AFTER UPDATE ON outbox_events FOR EACH ROW
           WHEN ((OLD.status <> NEW.status
                  AND NOT (OLD.status = 'pending' AND NEW.status = 'sent' AND OLD.lease_until IS NOT NULL))
                 OR OLD.doubts <> NEW.doubts OR OLD.held <> NEW.held)
           EXECUTE FUNCTION outbox_events_audit()""",
        """CREATE OR REPLACE TRIGGER outbox_events_delete_guard BEFORE DELETE ON outbox_events FOR EACH ROW
           WHEN (OLD.lease_until > now()) EXECUTE FUNCTION outbox_events_delete_guard()""",
        # Once for each statement: thousands of events in one INSERT are one call.
        """CREATE OR REPLACE TRIGGER outbox_events_wake_relay_insert AFTER INSERT ON outbox_events
           FOR EACH STATEMENT EXECUTE FUNCTION outbox_events_wake_relay()""",
        """CREATE OR REPLACE TRIGGER outbox_events_wake_relay_retry AFTER UPDATE ON outbox_events FOR EACH ROW
           WHEN (OLD.status <> 'pending' AND NEW.status = 'pending') EXECUTE FUNCTION outbox_events_wake_relay()""",
    ]


def postgresql_audit() -> str:
    pairs = ", ".join(f"('{name}', to_jsonb(OLD.{name}), to_jsonb(NEW.{name}))" for name in AUDITED)
    return f"""
    CREATE OR REPLACE FUNCTION outbox_events_audit() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        before text;
        after text;
        at timestamp := now() AT TIME ZONE 'UTC';
    BEGIN
        SELECT json_object_agg(name, o), json_object_agg(name, n) INTO before, after
        FROM (VALUES {pairs}) AS changed (name, o, n) WHERE o IS DISTINCT FROM n;
        {INTO}
        VALUES ('updated', '{TYPE}', NEW.id, before, after,
                concat_ws(' ', nullif(current_setting('application_name'), ''), session_user), at, at);
        RETURN NULL;
    END $$"""  # noqa: S608


# ---- SQLite


def sqlite_triggers() -> list[str]:
    changed = " UNION ALL ".join(
        f"SELECT '{name}' AS name, OLD.{name} AS o, NEW.{name} AS n WHERE OLD.{name} IS NOT NEW.{name}"
        for name in AUDITED
    )
    return [
        f"""CREATE TRIGGER outbox_events_audit_update AFTER UPDATE ON outbox_events
        WHEN (OLD.status <> NEW.status
            AND NOT (OLD.status = 'pending' AND NEW.status = 'sent' AND OLD.lease_until IS NOT NULL))
            OR OLD.doubts <> NEW.doubts OR OLD.held <> NEW.held
        BEGIN
            {INTO} SELECT 'updated', '{TYPE}', NEW.id, json_group_object(name, o), json_group_object(name, n),
                CASE WHEN OLD.lease_until IS NULL THEN 'sql' ELSE 'engine' END, {NOW}, {NOW} FROM ({changed});
        END""",  # noqa: S608
        f"""CREATE TRIGGER outbox_events_delete_guard BEFORE DELETE ON outbox_events WHEN OLD.lease_until > {NOW}
        BEGIN
            SELECT RAISE(ABORT, 'this row of outbox_events is being sent; delete it later');
        END""",
    ]
