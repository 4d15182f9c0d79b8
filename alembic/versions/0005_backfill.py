"""Status, sent_at and key for the rows of the old code, in chunks of their own transactions (see the module it calls).

Downgrade: nothing to do; 0002 drops the columns.
"""

from alembic import op

from processors._backfill import backfill_rows

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.get_context().autocommit_block(), op.get_bind().engine.connect() as connection:
        backfill_rows(connection)


def downgrade() -> None:
    """Leave the values to the downgrade that drops their columns."""
