"""The engine's own tables: offsets, dead letters, batches.

Downgrade: drops them with their rows, since the old schema has no place for them. After an upgrade processors begin at
the first record that the streams still hold; the keys in email_dispatches keep everyone from being mailed again.
Export dead_letters first if any are open.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    create_processor_offsets()
    create_dead_letters()
    create_batches()


def downgrade() -> None:
    for table in ("batch_duplicates", "import_slices", "import_batches", "dead_letters", "processor_offsets"):
        op.drop_table(table)


def number(name: str, kind: type[sa.Integer] = sa.Integer) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False, server_default="0")


def now(name: str) -> sa.Column[Any]:
    sqlite = op.get_bind().dialect.name == "sqlite"
    clock = "(strftime('%Y-%m-%d %H:%M:%f', 'now'))" if sqlite else "now()"
    return sa.Column(name, TIME, nullable=False, server_default=sa.text(clock))


def create_processor_offsets() -> None:
    op.create_table(
        "processor_offsets",
        sa.Column("processor", sa.Text, nullable=False),
        sa.Column("stream", sa.Text, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        number("next_offset", sa.BigInteger),
        number("epoch"),
        sa.Column("paused", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("paused_reason", sa.Text),
        sa.Column("halted_reason", sa.Text),
        number("starts"),
        sa.Column("last_id", sa.Text),
        sa.Column("last_timestamp_ms", sa.BigInteger),
        sa.Column("end_offset", sa.BigInteger),
        sa.Column("seen_at", TIME),
        now("updated_at"),
        sa.PrimaryKeyConstraint("processor", "stream", "partition", name="pk_processor_offsets"),
    )


def create_dead_letters() -> None:
    op.create_table(
        "dead_letters",
        sa.Column("id", ID, primary_key=True, autoincrement=True),
        sa.Column("processor", sa.Text, nullable=False),
        sa.Column("source_stream", sa.Text, nullable=False),
        sa.Column("source_partition", sa.Integer, nullable=False),
        sa.Column("source_offset", sa.BigInteger),
        sa.Column("item_index", sa.Integer),
        sa.Column("batch_id", sa.String(64)),
        sa.Column("message_key", sa.Text),
        sa.Column("table_name", sa.Text),
        sa.Column("row_id", sa.BigInteger),
        sa.Column("claim_no", sa.BigInteger),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        number("attempts"),
        sa.Column("body", sa.LargeBinary),
        sa.Column("body_hash", sa.String(64)),
        now("created_at"),
        sa.Column("redriven_at", TIME),
        sa.Column("redriven_by", sa.Text),
        sa.Column("queued_until", TIME),
        sa.Column("published_at", TIME),
        sqlite_autoincrement=True,
    )
    # One dead letter each for a claim of a row, an item of a batch, a record: a replay or a late process adds none.
    for name, columns, where in (
        ("row", "table_name, row_id, claim_no", "row_id IS NOT NULL"),
        ("item", "batch_id, item_index", "row_id IS NULL AND batch_id IS NOT NULL"),
        (
            "record",
            "processor, source_stream, source_partition, source_offset, body_hash",
            "row_id IS NULL AND batch_id IS NULL",
        ),
    ):
        op.execute(f"CREATE UNIQUE INDEX uq_dead_letters_{name} ON dead_letters ({columns}) WHERE {where}")


def create_batches() -> None:
    op.create_table(
        "import_batches",
        sa.Column("batch_id", sa.String(64), nullable=False),
        *(number(name) for name in ("total", "received", "valid", "rejected", "duplicates", "times_received")),
        now("created_at"),
        now("updated_at"),
        sa.PrimaryKeyConstraint("batch_id", name="pk_import_batches"),
    )
    op.create_table(
        "import_slices",
        sa.Column("stream", sa.Text, nullable=False),
        sa.Column("partition", sa.Integer, nullable=False),
        sa.Column("source_offset", sa.BigInteger, nullable=False),
        sa.Column("batch_id", sa.String(64), nullable=False),
        *(number(name) for name in ("first_index", "items", "valid", "rejected", "duplicates")),
        now("created_at"),
        sa.PrimaryKeyConstraint("stream", "partition", "source_offset", "batch_id", name="pk_import_slices"),
    )
    op.create_index("ix_import_slices_batch_id", "import_slices", ["batch_id"])
    op.create_table(
        "batch_duplicates",
        sa.Column("batch_id", sa.String(64), nullable=False),
        sa.Column("item_index", sa.Integer, nullable=False),
        sa.Column("idempotency_key", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("batch_id", "item_index", name="pk_batch_duplicates"),
    )
