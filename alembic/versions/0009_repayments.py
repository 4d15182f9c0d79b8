"""Repayments: payments and their installments, what was split anew, and the requests, whose rows live by the protocol.

The triggers of the requests are those of the outbox: they audit changes of state, refuse a DELETE in mid-act, and wake
the relay for a retry. Not audited: that a row which was claimed has been done; that the processor audits itself, on the
payment, in the same transaction. On PostgreSQL there are a view and two functions for the person with psql as well.

Downgrade: stop the engine first. Drops the tables with their rows, since the older schema has no place for them: export
payments and repayments. Charges at the gateway stay as they are, and so do audits.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True)
MONEY = sa.Numeric(14, 2).with_variant(sa.Text(), "sqlite")
TABLE = "repayment_requests"
AUDITED = ("status", "attempts", "claim_no", "doubts", "held", "last_error")
TYPE = r"App\Models\RepaymentRequest"
INTO = "INSERT INTO audits (event, auditable_type, auditable_id, old_values, new_values, tags, created_at, updated_at)"
NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now')"


def upgrade() -> None:
    postgresql = op.get_bind().dialect.name == "postgresql"
    clock = sa.text("now()" if postgresql else f"({NOW})")
    create_payments(clock)
    create_requests(clock)
    create_repayments(clock)
    for statement in (*postgresql_triggers(), *admin_sql()) if postgresql else sqlite_triggers():
        op.get_bind().exec_driver_sql(statement)


def downgrade() -> None:
    postgresql = op.get_bind().dialect.name == "postgresql"
    if postgresql:
        op.execute("DROP FUNCTION retry_repayment_request(bigint)")
        op.execute("DROP FUNCTION retry_repayment_requests(text, text, timestamptz)")
        op.execute("DROP VIEW failed_repayment_requests")
    for table in ("repayments", TABLE, "installments", "payments"):
        op.drop_table(table)
    if postgresql:
        for function in ("audit", "delete_guard", "wake_relay"):
            op.execute(f"DROP FUNCTION {TABLE}_{function}()")


# ---- tables


def create_payments(clock: Any) -> None:
    op.create_table(
        "payments",
        sa.Column("id", ID, primary_key=True, autoincrement=True),
        sa.Column("reference", sa.Text, nullable=False),
        sa.Column("customer", sa.Text, nullable=False),
        sa.Column("billing_type", sa.Text, nullable=False),
        sa.Column("value", MONEY, nullable=False),
        sa.Column("status", sa.Text, nullable=False, server_default="open"),
        sa.Column("due_date", sa.Date, nullable=False),
        sa.Column("gateway_id", sa.Text),
        sa.Column("product_slug", sa.Text),
        *times(clock),
        unique("payments", "reference"),
        unique("payments", "gateway_id"),
        check("payments", "status", "status IN ('open', 'overdue', 'paid', 'cancelled', 'renegotiated')"),
        check("payments", "value", "CAST(value AS numeric) > 0"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "installments",
        sa.Column("id", ID, primary_key=True, autoincrement=True),
        reference("installments", "payment_id", "payments", nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("value", MONEY, nullable=False),
        sa.Column("status", sa.Text, nullable=False, server_default="open"),
        sa.Column("due_date", sa.Date, nullable=False),
        sa.Column("gateway_id", sa.Text),
        *times(clock),
        unique("installments", "payment_id", "number"),
        unique("installments", "gateway_id"),
        check("installments", "status", "status IN ('open', 'overdue', 'paid', 'cancelled')"),
        check("installments", "value", "CAST(value AS numeric) > 0"),
        sqlite_autoincrement=True,
    )


def create_requests(clock: Any) -> None:
    op.create_table(
        TABLE,
        sa.Column("id", ID, primary_key=True, autoincrement=True),
        sa.Column("reference", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("original_payment_id", sa.BigInteger),
        sa.Column("status", sa.Text, nullable=False, server_default="pending"),
        number("attempts"),
        sa.Column("last_error", sa.Text),
        sa.Column("sent_at", TIME),
        sa.Column("traceparent", sa.Text),
        *times(clock),
        sa.Column("next_attempt_at", TIME),
        number("claim_no", sa.BigInteger),
        sa.Column("lease_until", TIME),
        sa.Column("queued_until", TIME),
        number("doubts"),
        sa.Column("held", sa.Boolean, nullable=False, server_default=sa.false()),
        unique(TABLE, "reference"),
        check(TABLE, "status", "status IN ('pending', 'sent', 'failed')"),
        check(TABLE, "pending_never_sent_nor_held", "status <> 'pending' OR (sent_at IS NULL AND NOT held)"),
        sqlite_autoincrement=True,
    )
    op.create_index(f"ix_{TABLE}_status_created_at", TABLE, ["status", "created_at"])
    op.create_index(f"ix_{TABLE}_original_payment_id", TABLE, ["original_payment_id"])
    op.execute(
        f"CREATE INDEX ix_{TABLE}_due ON {TABLE} "
        "(coalesce(queued_until, next_attempt_at, created_at)) WHERE status = 'pending'"
    )


def create_repayments(clock: Any) -> None:
    op.create_table(
        "repayments",
        sa.Column("id", ID, primary_key=True, autoincrement=True),
        sa.Column("reference", sa.Text, nullable=False),
        reference("repayments", "request_id", TABLE, nullable=False),
        reference("repayments", "payment_id", "payments", nullable=False),
        reference("repayments", "original_payment_id", "payments", nullable=True),
        sa.Column("requested_by", sa.Text, nullable=False),
        sa.Column("created_at", TIME, nullable=False, server_default=clock),
        *(unique("repayments", column) for column in ("reference", "request_id", "payment_id", "original_payment_id")),
        sqlite_autoincrement=True,
    )


def number(name: str, kind: type[sa.Integer] = sa.Integer) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False, server_default="0")


def times(clock: Any) -> list[sa.Column[Any]]:
    return [sa.Column(name, TIME, nullable=False, server_default=clock) for name in ("created_at", "updated_at")]


def reference(table: str, column: str, other: str, *, nullable: bool) -> sa.Column[Any]:
    key = sa.ForeignKey(f"{other}.id", name=op.f(f"fk_{table}_{column}_{other}"))
    return sa.Column(column, sa.BigInteger, key, nullable=nullable)


def unique(table: str, *columns: str) -> sa.UniqueConstraint:
    return sa.UniqueConstraint(*columns, name=op.f(f"uq_{table}_{'_'.join(columns)}"))


def check(table: str, name: str, rule: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(rule, name=op.f(f"ck_{table}_{name}"))


# ---- triggers on PostgreSQL


def postgresql_triggers() -> list[str]:
    return [
        postgresql_audit(),
        f"""CREATE OR REPLACE FUNCTION {TABLE}_delete_guard() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            RAISE EXCEPTION '{TABLE} row % is in progress until %; delete it later', OLD.id, OLD.lease_until
                USING ERRCODE = 'object_in_use';
        END $$""",
        f"""CREATE OR REPLACE FUNCTION {TABLE}_wake_relay() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pg_notify('afluente_relay', '{TABLE}');
            RETURN NULL;
        END $$""",
        f"""CREATE OR REPLACE TRIGGER {TABLE}_audit_update AFTER UPDATE ON {TABLE} FOR EACH ROW
           WHEN ((OLD.status <> NEW.status
                  AND NOT (OLD.status = 'pending' AND NEW.status = 'sent' AND OLD.lease_until IS NOT NULL))
                 OR OLD.doubts <> NEW.doubts OR OLD.held <> NEW.held)
           EXECUTE FUNCTION {TABLE}_audit()""",
        f"""CREATE OR REPLACE TRIGGER {TABLE}_delete_guard BEFORE DELETE ON {TABLE} FOR EACH ROW
           WHEN (OLD.lease_until > now()) EXECUTE FUNCTION {TABLE}_delete_guard()""",
        f"""CREATE OR REPLACE TRIGGER {TABLE}_wake_relay_retry AFTER UPDATE ON {TABLE} FOR EACH ROW
           WHEN (OLD.status <> 'pending' AND NEW.status = 'pending') EXECUTE FUNCTION {TABLE}_wake_relay()""",
    ]


def postgresql_audit() -> str:
    pairs = ", ".join(f"('{name}', to_jsonb(OLD.{name}), to_jsonb(NEW.{name}))" for name in AUDITED)
    return f"""
    CREATE OR REPLACE FUNCTION {TABLE}_audit() RETURNS trigger LANGUAGE plpgsql AS $$
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


# ---- triggers on SQLite


def sqlite_triggers() -> list[str]:
    changed = " UNION ALL ".join(
        f"SELECT '{name}' AS name, OLD.{name} AS o, NEW.{name} AS n WHERE OLD.{name} IS NOT NEW.{name}"
        for name in AUDITED
    )
    return [
        f"""CREATE TRIGGER {TABLE}_audit_update AFTER UPDATE ON {TABLE}
        WHEN (OLD.status <> NEW.status
            AND NOT (OLD.status = 'pending' AND NEW.status = 'sent' AND OLD.lease_until IS NOT NULL))
            OR OLD.doubts <> NEW.doubts OR OLD.held <> NEW.held
        BEGIN
            {INTO} SELECT 'updated', '{TYPE}', NEW.id, json_group_object(name, o), json_group_object(name, n),
                CASE WHEN OLD.lease_until IS NULL THEN 'sql' ELSE 'engine' END, {NOW}, {NOW} FROM ({changed});
        END""",  # noqa: S608
        f"""CREATE TRIGGER {TABLE}_delete_guard BEFORE DELETE ON {TABLE} WHEN OLD.lease_until > {NOW}
        BEGIN
            SELECT RAISE(ABORT, 'this row of {TABLE} is in progress; delete it later');
        END""",
    ]


# ---- for the person with psql


def admin_sql() -> list[str]:
    """As for events and e-mails: a view to look, a function for one and one for many."""
    return [
        f"""CREATE VIEW failed_repayment_requests AS
        SELECT id, reference, original_payment_id, attempts, claim_no AS tries_ever, doubts, held, last_error,
            created_at, updated_at AS failed_at
        FROM {TABLE} WHERE status = 'failed'""",  # noqa: S608
        f"""CREATE FUNCTION retry_repayment_request(wanted bigint) RETURNS text LANGUAGE plpgsql AS $$
        DECLARE
            found {TABLE}%ROWTYPE;
        BEGIN
            SELECT * INTO found FROM {TABLE} WHERE id = wanted FOR UPDATE;
            IF found.id IS NULL THEN
                RAISE EXCEPTION 'there is no request %', wanted USING ERRCODE = 'no_data_found';
            ELSIF found.status = 'sent' THEN
                RAISE EXCEPTION 'request % was sent: not retried', wanted
                    USING ERRCODE = 'object_not_in_prerequisite_state';
            ELSIF found.held THEN
                RAISE EXCEPTION 'request % is held: not retried', wanted
                    USING ERRCODE = 'object_not_in_prerequisite_state';
            ELSIF found.lease_until > now() THEN
                RAISE EXCEPTION 'request % is in progress until %: not retried', wanted, found.lease_until
                    USING ERRCODE = 'object_in_use';
            END IF;
            UPDATE {TABLE} SET status = 'pending', attempts = 0, last_error = NULL, next_attempt_at = NULL,
                updated_at = now() WHERE id = wanted;
            RETURN 'retried';
        END $$""",  # noqa: S608
        f"""CREATE FUNCTION retry_repayment_requests(
            reference_like text DEFAULT NULL, error_like text DEFAULT NULL, failed_since timestamptz DEFAULT NULL)
        RETURNS TABLE (row_id bigint, result text) LANGUAGE sql AS $$
            WITH wanted AS (
                    SELECT f.id, f.held FROM {TABLE} AS f
                    WHERE f.status = 'failed' AND (reference_like IS NULL OR f.reference LIKE reference_like)
                        AND (error_like IS NULL OR f.last_error LIKE error_like)
                        AND (failed_since IS NULL OR f.updated_at >= failed_since)
                    ORDER BY f.id FOR UPDATE),
                retried AS (
                    UPDATE {TABLE} AS t SET status = 'pending', attempts = 0, last_error = NULL,
                        next_attempt_at = NULL, updated_at = now()
                    FROM wanted WHERE t.id = wanted.id AND NOT wanted.held)
            SELECT id, CASE WHEN held THEN 'held: not retried' ELSE 'retried' END FROM wanted ORDER BY id
        $$""",  # noqa: S608
    ]
