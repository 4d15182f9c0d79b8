"""What the engine needs of email_dispatches: new columns, checks, indexes; dispatched_at becomes nullable.

The old code keeps inserting meanwhile and afterwards: `status` has no default, null marks its rows. On PostgreSQL each
step takes its lock for an instant only and may be repeated; nothing rewrites the table. SQLite copies it.

Downgrade: stop the engine first. The old schema cannot say that a mail was not sent, so rows that were not (pending,
failed) move to `email_dispatches_parked`, and what the engine knew of the others to `email_dispatches_parked_facts`;
an upgrade takes both back and drops them. Types that only grew (varchar to text) stay. Nothing is lost; but who gets a
mail from the old code meanwhile gets it again from a row that was taken back pending.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from alembic import op
from alembic.operations import BatchOperations

from processors._migration_steps import build_index, patiently

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

STATUS = "status IN ('pending', 'sent', 'failed')"
NEVER_RESENT = "status IS NULL OR status <> 'pending' OR (sent_at IS NULL AND NOT held)"
OLD = ("id", '"to"', "subject", "content", "mailable_type", "meta", "dispatched_at", "created_at", "updated_at")
COLUMNS = {
    "status": "text",
    "idempotency_key": "varchar(64)",
    "attempts": "integer NOT NULL DEFAULT 0",
    "error_message": "text",
    "sent_at": "timestamptz",
    "batch_id": "varchar(64)",
    "batch_index": "integer",
    "message_id": "text",
    "next_attempt_at": "timestamptz",
    "claim_no": "bigint NOT NULL DEFAULT 0",
    "lease_until": "timestamptz",
    "queued_until": "timestamptz",
    "doubts": "integer NOT NULL DEFAULT 0",
    "held": "boolean NOT NULL DEFAULT false",
}


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        expand_postgresql()
    else:
        expand_sqlite()
    take_back()


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '4s'")
        op.execute("LOCK TABLE email_dispatches")
    park()
    if op.get_bind().dialect.name == "postgresql":
        contract_postgresql()
    else:
        contract_sqlite()


# ---- up


def expand_postgresql() -> None:
    added = ", ".join(f"ADD COLUMN IF NOT EXISTS {name} {kind}" for name, kind in COLUMNS.items())
    widened = ", ".join(f"ALTER COLUMN {name} TYPE text" for name in ('"to"', "subject", "mailable_type"))
    with op.get_context().autocommit_block():
        patiently(f"ALTER TABLE email_dispatches {added}, {widened}, ALTER COLUMN dispatched_at DROP NOT NULL")
        for name, condition in (("status", STATUS), ("pending_never_sent_nor_held", NEVER_RESENT)):
            check = f"ck_email_dispatches_{name}"
            patiently(
                f"ALTER TABLE email_dispatches DROP CONSTRAINT IF EXISTS {check}, "
                f"ADD CONSTRAINT {check} CHECK ({condition}) NOT VALID"
            )
            patiently(f"ALTER TABLE email_dispatches VALIDATE CONSTRAINT {check}")
        for name, unique, rest in (
            ("uq_email_dispatches_idempotency_key", "UNIQUE", "(idempotency_key)"),
            ("ix_email_dispatches_batch_id", "", "(batch_id)"),
            ("ix_email_dispatches_failed", "", "(id) WHERE status = 'failed'"),
            (
                "ix_email_dispatches_due",
                "",
                "(coalesce(queued_until, next_attempt_at, created_at AT TIME ZONE 'UTC')) WHERE status = 'pending'",
            ),
        ):
            build_index(name, f"CREATE {unique} INDEX CONCURRENTLY IF NOT EXISTS {name} ON email_dispatches {rest}")


def expand_sqlite() -> None:
    """SQLite can neither add a table check nor drop NOT NULL; alembic's batch mode copies the table."""
    with copy_of_table() as table:
        for column in sqlite_columns():
            table.add_column(column)
        for name in ("to", "subject", "mailable_type"):
            table.alter_column(name, type_=sa.Text(), existing_nullable=False)
        table.alter_column("dispatched_at", existing_type=sa.DateTime(), nullable=True)
        table.create_check_constraint(op.f("ck_email_dispatches_status"), STATUS)
        table.create_check_constraint(op.f("ck_email_dispatches_pending_never_sent_nor_held"), NEVER_RESENT)
    op.execute("CREATE UNIQUE INDEX uq_email_dispatches_idempotency_key ON email_dispatches (idempotency_key)")
    op.execute("CREATE INDEX ix_email_dispatches_batch_id ON email_dispatches (batch_id)")
    op.execute("CREATE INDEX ix_email_dispatches_failed ON email_dispatches (id) WHERE status = 'failed'")
    op.execute(
        "CREATE INDEX ix_email_dispatches_due ON email_dispatches "
        "(coalesce(queued_until, next_attempt_at, created_at)) WHERE status = 'pending'"
    )


@contextmanager
def copy_of_table() -> Iterator[BatchOperations]:
    """Alembic's batch mode, and the sequence of ids goes on where it was: ids of deleted rows never come back."""
    used = "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'email_dispatches'"
    last = op.get_bind().exec_driver_sql(used).scalar_one()
    counting = {"sqlite_autoincrement": True}
    with op.batch_alter_table("email_dispatches", recreate="always", table_kwargs=counting) as table:
        yield table
    op.execute("DELETE FROM sqlite_sequence WHERE name = 'email_dispatches'")
    op.execute(
        "INSERT INTO sqlite_sequence (name, seq) "  # noqa: S608
        f"SELECT 'email_dispatches', max({last}, coalesce(max(id), 0)) FROM email_dispatches"
    )


def sqlite_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("status", sa.Text),
        sa.Column("idempotency_key", sa.String(64)),
        sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
        sa.Column("error_message", sa.Text),
        sa.Column("sent_at", sa.DateTime),
        sa.Column("batch_id", sa.String(64)),
        sa.Column("batch_index", sa.Integer),
        sa.Column("message_id", sa.Text),
        sa.Column("next_attempt_at", sa.DateTime),
        sa.Column("claim_no", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("lease_until", sa.DateTime),
        sa.Column("queued_until", sa.DateTime),
        sa.Column("doubts", sa.Integer, nullable=False, server_default="0"),
        sa.Column("held", sa.Boolean, nullable=False, server_default=sa.false()),
    ]


# ---- down, and what an upgrade takes back


def park() -> None:
    """Keep what the old schema cannot hold. Rows of the backfill need no keeping: it makes the same of them again."""
    op.execute("CREATE TABLE email_dispatches_parked AS SELECT * FROM email_dispatches WHERE status <> 'sent'")
    op.execute(
        f"CREATE TABLE email_dispatches_parked_facts AS SELECT id, dispatched_at, {', '.join(COLUMNS)} "  # noqa: S608
        "FROM email_dispatches WHERE status = 'sent' AND claim_no > 0"
    )
    op.execute("DELETE FROM email_dispatches WHERE status <> 'sent'")
    op.execute(
        "UPDATE email_dispatches SET dispatched_at = coalesce(sent_at, updated_at, created_at, CURRENT_TIMESTAMP) "
        "WHERE dispatched_at IS NULL"
    )


def take_back() -> None:
    if not sa.inspect(op.get_bind()).has_table("email_dispatches_parked"):
        return
    every = ", ".join((*OLD, *COLUMNS))
    op.execute(f"INSERT INTO email_dispatches ({every}) SELECT {every} FROM email_dispatches_parked")  # noqa: S608
    facts = ", ".join(f"{name} = p.{name}" for name in ("dispatched_at", *COLUMNS))
    op.execute(
        f"UPDATE email_dispatches SET {facts} "  # noqa: S608
        "FROM email_dispatches_parked_facts AS p WHERE p.id = email_dispatches.id"
    )
    op.drop_table("email_dispatches_parked")
    op.drop_table("email_dispatches_parked_facts")


def contract_postgresql() -> None:
    op.execute("ALTER TABLE email_dispatches DROP CONSTRAINT ck_email_dispatches_pending_never_sent_nor_held")
    op.execute("ALTER TABLE email_dispatches DROP CONSTRAINT ck_email_dispatches_status")
    dropped = ", ".join(f"DROP COLUMN {name}" for name in COLUMNS)  # their indexes go with them
    op.execute(f"ALTER TABLE email_dispatches {dropped}, ALTER COLUMN dispatched_at SET NOT NULL")


def contract_sqlite() -> None:
    for name in ("due", "failed", "batch_id"):
        op.execute(f"DROP INDEX ix_email_dispatches_{name}")
    op.execute("DROP INDEX uq_email_dispatches_idempotency_key")
    with copy_of_table() as table:
        table.drop_constraint(op.f("ck_email_dispatches_pending_never_sent_nor_held"), type_="check")
        table.drop_constraint(op.f("ck_email_dispatches_status"), type_="check")
        for name in COLUMNS:
            table.drop_column(name)
        table.alter_column("dispatched_at", existing_type=sa.DateTime(), nullable=False)
