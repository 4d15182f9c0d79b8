"""Steps of a revision on a PostgreSQL table that others use meanwhile: short locks, asked for again and again.

An ALTER TABLE that waits for its lock makes everyone behind it wait too. So each waits a few seconds only, gives way,
and asks again. Every step runs outside a transaction and may be repeated: a revision that was cut off begins anew.
"""

import logging
import time

from alembic import op
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

LOCK_SECONDS = 4
PATIENCE = 10
PAUSE_SECONDS = 3.0
LOCK_NOT_AVAILABLE = "55P03"

logger = logging.getLogger(__name__)


def patiently(statement: str) -> None:
    """Run a statement with a lock_timeout of 4 s, up to 10 times. Only inside an `autocommit_block`."""
    op.execute(f"SET lock_timeout = '{LOCK_SECONDS}s'")
    try:
        for left in reversed(range(PATIENCE)):
            if _done(statement, last=left == 0):
                return
            logger.warning("the table is in use; %s more tries to get its lock", left)
            time.sleep(PAUSE_SECONDS)
    finally:
        op.execute("RESET lock_timeout")


def build_index(name: str, definition: str) -> None:
    """CREATE [UNIQUE] INDEX CONCURRENTLY; what an attempt that died has left behind, invalid, goes first.

    No lock_timeout here: it stops nobody's work, and has to wait for the transactions that were open before it.
    """
    invalid = text("SELECT 1 FROM pg_index WHERE indexrelid = to_regclass(:name) AND NOT indisvalid")
    if op.get_bind().execute(invalid, {"name": name}).first():
        op.execute(f"DROP INDEX CONCURRENTLY {name}")
    op.execute(definition)


def _done(statement: str, *, last: bool) -> bool:
    try:
        op.execute(statement)
    except DBAPIError as error:
        if last or getattr(error.orig, "sqlstate", None) != LOCK_NOT_AVAILABLE:
            raise
        return False
    return True
