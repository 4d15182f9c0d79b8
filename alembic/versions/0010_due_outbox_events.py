"""Due events apart from those whose message is under way, so that one new event is found among a hundred thousand.

One index led to all that are pending, in the order of the relay: what waits in the stream came last, but the relay read
through all of it whenever fewer events were due than it takes at once, that is for nearly every event. Now one index
leads to the due ones and another to those that may have to be published again.

Up and down at any time, while others write; an engine of the other side is only slower meanwhile.
"""

from alembic import op

from processors._migration_steps import build_index

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

OLD = {"ix_outbox_events_due": "(coalesce(queued_until, next_attempt_at, created_at)) WHERE status = 'pending'"}
NEW = {
    "ix_outbox_events_waiting": (
        "(coalesce(next_attempt_at, created_at)) WHERE status = 'pending' AND queued_until IS NULL"
    ),
    "ix_outbox_events_queued": "(queued_until) WHERE status = 'pending' AND queued_until IS NOT NULL",
}


def upgrade() -> None:
    exchange(NEW, OLD)


def downgrade() -> None:
    exchange(OLD, NEW)


def exchange(made: dict[str, str], dropped: dict[str, str]) -> None:
    if op.get_bind().dialect.name != "postgresql":
        for name, rest in made.items():
            op.execute(f"CREATE INDEX {name} ON outbox_events {rest}")
        for name in dropped:
            op.execute(f"DROP INDEX {name}")
        return
    with op.get_context().autocommit_block():
        for name, rest in made.items():
            build_index(name, f"CREATE INDEX CONCURRENTLY IF NOT EXISTS {name} ON outbox_events {rest}")
        for name in dropped:
            op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")
