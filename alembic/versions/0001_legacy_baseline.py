"""The two tables as the old service made them, where they do not exist yet.

Downgrade: nothing is dropped. Whether the tables were here first, nobody knows any more.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import INET, TIMESTAMP

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime().with_variant(TIMESTAMP(precision=0), "postgresql")
IP = sa.String(45).with_variant(INET(), "postgresql")


def upgrade() -> None:
    existing = sa.inspect(op.get_bind()).get_table_names()
    if "email_dispatches" not in existing:
        create_email_dispatches()
    if "audits" not in existing:
        create_audits()


def downgrade() -> None:
    """Leave the tables and their rows to whoever had them first."""


def create_email_dispatches() -> None:
    op.create_table(
        "email_dispatches",
        sa.Column("id", ID, primary_key=True, autoincrement=True),
        sa.Column("to", sa.String(255), nullable=False),
        sa.Column("subject", sa.String(255), nullable=False),
        sa.Column("content", sa.Text, nullable=False),
        sa.Column("mailable_type", sa.String(255), nullable=False),
        sa.Column("meta", sa.JSON),
        sa.Column("dispatched_at", TIME, nullable=False),
        sa.Column("created_at", TIME),
        sa.Column("updated_at", TIME),
        sqlite_autoincrement=True,
    )


def create_audits() -> None:
    """The table of owen-it/laravel-auditing."""
    op.create_table(
        "audits",
        sa.Column("id", ID, primary_key=True, autoincrement=True),
        sa.Column("user_type", sa.String(255)),
        sa.Column("user_id", sa.BigInteger),
        sa.Column("event", sa.String(255), nullable=False),
        sa.Column("auditable_type", sa.String(255), nullable=False),
        sa.Column("auditable_id", sa.BigInteger, nullable=False),
        sa.Column("old_values", sa.Text),
        sa.Column("new_values", sa.Text),
        sa.Column("url", sa.Text),
        sa.Column("ip_address", IP),
        sa.Column("user_agent", sa.String(1023)),
        sa.Column("tags", sa.String(255)),
        sa.Column("created_at", TIME),
        sa.Column("updated_at", TIME),
        sqlite_autoincrement=True,
    )
    op.create_index("audits_user_id_user_type_index", "audits", ["user_id", "user_type"])
    op.create_index("audits_auditable_type_auditable_id_index", "audits", ["auditable_type", "auditable_id"])
