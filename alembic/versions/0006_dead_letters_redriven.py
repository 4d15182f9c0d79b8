"""What redrive and publication need of dead_letters: when the work began, which older letter it names, three indexes.

A registration that is redriven and rejected again is a new dead letter of the same batch and index, so their unique
index now is of first letters only.

Downgrade: stop the engine first. Letters of registrations that were rejected again after a redrive go, since the older
schema holds one for each; their first letters stay. Which letter was redriven into which is forgotten.
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

ITEM = "row_id IS NULL AND batch_id IS NOT NULL"
RECORD = "row_id IS NULL AND batch_id IS NULL"


def upgrade() -> None:
    op.add_column("dead_letters", sa.Column("first_at", sa.DateTime(timezone=True)))
    op.add_column("dead_letters", sa.Column("redriven_from", sa.BigInteger))
    op.execute("DROP INDEX uq_dead_letters_item")
    op.execute(
        f"CREATE UNIQUE INDEX uq_dead_letters_item ON dead_letters (batch_id, item_index) "
        f"WHERE {ITEM} AND redriven_from IS NULL"
    )
    op.execute(
        "CREATE UNIQUE INDEX uq_dead_letters_item_again ON dead_letters (batch_id, item_index, redriven_from) "
        f"WHERE {ITEM} AND redriven_from IS NOT NULL"
    )
    op.execute(f"CREATE INDEX ix_dead_letters_body_hash ON dead_letters (body_hash) WHERE {RECORD}")
    op.execute("CREATE INDEX ix_dead_letters_unpublished ON dead_letters (id) WHERE published_at IS NULL")


def downgrade() -> None:
    op.execute(f"DELETE FROM dead_letters WHERE {ITEM} AND redriven_from IS NOT NULL")  # noqa: S608
    for name in ("uq_dead_letters_item", "uq_dead_letters_item_again"):
        op.execute(f"DROP INDEX {name}")
    for name in ("ix_dead_letters_body_hash", "ix_dead_letters_unpublished"):
        op.execute(f"DROP INDEX {name}")
    op.execute(f"CREATE UNIQUE INDEX uq_dead_letters_item ON dead_letters (batch_id, item_index) WHERE {ITEM}")
    op.drop_column("dead_letters", "redriven_from")
    op.drop_column("dead_letters", "first_at")
