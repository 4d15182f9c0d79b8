"""Triggers on email_dispatches: the audit of each change of state, a guard against DELETE in mid-send, a wake-up call.

In the database and not in the code, so that SQL by hand is audited and guarded too. The backfill's change (null to
sent) is not audited: it is no event, and would be one audit row for each mail ever sent.

Downgrade: drops the triggers. What they wrote to audits stays.
"""

import sqlalchemy as sa
from alembic import op

from processors._migration_steps import patiently

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

AUDITED = ("status", "attempts", "claim_no", "doubts", "held", "error_message")
TYPE = r"App\Models\EmailDispatch"
INTO = "INSERT INTO audits (event, auditable_type, auditable_id, old_values, new_values, tags, created_at, updated_at)"
NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now')"


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(sa.text(postgresql_audit()))
        op.execute(sa.text(POSTGRESQL_GUARD))
        op.execute(sa.text(POSTGRESQL_WAKE))
        with op.get_context().autocommit_block():
            for trigger in POSTGRESQL_TRIGGERS:
                patiently(f"CREATE OR REPLACE TRIGGER {trigger}")
    else:
        for trigger in sqlite_triggers():
            op.get_bind().exec_driver_sql(f"CREATE TRIGGER {trigger}")


def downgrade() -> None:
    postgresql = op.get_bind().dialect.name == "postgresql"
    table = " ON email_dispatches" if postgresql else ""
    if postgresql:
        op.execute("SET LOCAL lock_timeout = '4s'")
    for trigger in ("audit_insert", "audit_update", "delete_guard"):
        op.execute(f"DROP TRIGGER email_dispatches_{trigger}{table}")
    if postgresql:
        op.execute("DROP TRIGGER email_dispatches_wake_relay ON email_dispatches")
        for function in ("audit", "delete_guard", "wake_relay"):
            op.execute(f"DROP FUNCTION email_dispatches_{function}()")


# ---- PostgreSQL


def postgresql_audit() -> str:
    """Who did it is `application_name`, by which every process of ours names itself, and the role."""
    new = ", ".join(f"'{name}', NEW.{name}" for name in AUDITED)
    pairs = ", ".join(f"('{name}', to_jsonb(OLD.{name}), to_jsonb(NEW.{name}))" for name in AUDITED)
    return f"""
    CREATE OR REPLACE FUNCTION email_dispatches_audit() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        before text := '{{}}';
        after text;
        at timestamp := now() AT TIME ZONE 'UTC';
    BEGIN
        IF TG_OP = 'INSERT' THEN
            after := json_build_object({new});
        ELSE
            SELECT json_object_agg(name, o), json_object_agg(name, n) INTO before, after
            FROM (VALUES {pairs}) AS changed (name, o, n) WHERE o IS DISTINCT FROM n;
        END IF;
        {INTO}
        VALUES (CASE TG_OP WHEN 'INSERT' THEN 'created' ELSE 'updated' END, '{TYPE}', NEW.id, before, after,
                concat_ws(' ', nullif(current_setting('application_name'), ''), session_user), at, at);
        RETURN NULL;
    END $$"""  # noqa: S608


POSTGRESQL_GUARD = """
    CREATE OR REPLACE FUNCTION email_dispatches_delete_guard() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION 'email_dispatches row % is being sent until %; delete it later', OLD.id, OLD.lease_until
            USING ERRCODE = 'object_in_use';
    END $$"""

POSTGRESQL_WAKE = """
    CREATE OR REPLACE FUNCTION email_dispatches_wake_relay() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_notify('afluente_relay', '');
        RETURN NULL;
    END $$"""

POSTGRESQL_TRIGGERS = (
    """email_dispatches_audit_insert AFTER INSERT ON email_dispatches FOR EACH ROW
       WHEN (NEW.status IS NOT NULL) EXECUTE FUNCTION email_dispatches_audit()""",
    """email_dispatches_audit_update AFTER UPDATE ON email_dispatches FOR EACH ROW
       WHEN ((OLD.status IS DISTINCT FROM NEW.status AND NOT (OLD.status IS NULL AND NEW.status = 'sent'))
             OR OLD.doubts <> NEW.doubts OR OLD.held <> NEW.held) EXECUTE FUNCTION email_dispatches_audit()""",
    """email_dispatches_delete_guard BEFORE DELETE ON email_dispatches FOR EACH ROW
       WHEN (OLD.lease_until > now()) EXECUTE FUNCTION email_dispatches_delete_guard()""",
    # The engine itself makes no row pending that was something else: this is a person, or a redrive.
    """email_dispatches_wake_relay AFTER UPDATE ON email_dispatches FOR EACH ROW
       WHEN (OLD.status IS DISTINCT FROM 'pending' AND NEW.status = 'pending')
       EXECUTE FUNCTION email_dispatches_wake_relay()""",
)


# ---- SQLite


def sqlite_triggers() -> list[str]:
    """SQLite has no sessions with names: a row that was leased was changed by its holder, all else came as SQL."""
    new = ", ".join(f"'{name}', NEW.{name}" for name in AUDITED)
    changed = " UNION ALL ".join(
        f"SELECT '{name}' AS name, OLD.{name} AS o, NEW.{name} AS n WHERE OLD.{name} IS NOT NEW.{name}"
        for name in AUDITED
    )
    return [
        f"""email_dispatches_audit_insert AFTER INSERT ON email_dispatches WHEN NEW.status IS NOT NULL
        BEGIN
            {INTO}
            VALUES ('created', '{TYPE}', NEW.id, '{{}}', json_object({new}),
                CASE WHEN coalesce(NEW.queued_until, NEW.lease_until) IS NULL THEN 'sql' ELSE 'engine' END,
                {NOW}, {NOW});
        END""",  # noqa: S608
        f"""email_dispatches_audit_update AFTER UPDATE ON email_dispatches
        WHEN (OLD.status IS NOT NEW.status AND NOT (OLD.status IS NULL AND NEW.status = 'sent'))
            OR OLD.doubts <> NEW.doubts OR OLD.held <> NEW.held
        BEGIN
            {INTO} SELECT 'updated', '{TYPE}', NEW.id, json_group_object(name, o), json_group_object(name, n),
                CASE WHEN OLD.lease_until IS NULL THEN 'sql' ELSE 'engine' END, {NOW}, {NOW} FROM ({changed});
        END""",  # noqa: S608
        f"""email_dispatches_delete_guard BEFORE DELETE ON email_dispatches WHEN OLD.lease_until > {NOW}
        BEGIN
            SELECT RAISE(ABORT, 'this row of email_dispatches is being sent; delete it later');
        END""",
    ]
