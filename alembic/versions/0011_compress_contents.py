"""Contents of mails are compressed by LZ4 where the server can do it: a third of what it took to insert a row.

PostgreSQL compresses values of more than 2 kB or so, by default with a slower method of its own: 25 us of a mail's
55 to 80 us. What is stored already stays as it is and is read as before.

Up and down at any time, while others write.
"""

from alembic import op
from sqlalchemy import text

from processors._migration_steps import patiently

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    compress("lz4")


def downgrade() -> None:
    compress("default")


def compress(method: str) -> None:
    """Servers before 14 know no methods, and some are built without LZ4."""
    if op.get_bind().dialect.name != "postgresql":
        return
    known = text("SELECT 1 FROM pg_settings WHERE name = 'default_toast_compression' AND 'lz4' = ANY(enumvals)")
    if op.get_bind().execute(known).first():
        with op.get_context().autocommit_block():
            patiently(f"ALTER TABLE email_dispatches ALTER COLUMN content SET COMPRESSION {method}")
