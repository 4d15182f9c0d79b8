"""What the person with psql uses: four views to look, four functions to retry. On PostgreSQL only.

They say by name what they do not retry; the plain UPDATE works as well, and the table refuses what it must not do
(docs/admin-sql.md). Nothing of ours reads them.

Downgrade: drops them. No row is touched.
"""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

FUNCTIONS = {
    "retry_outbox_event": "bigint",
    "retry_outbox_events": "text, text, timestamptz",
    "retry_email_dispatch": "bigint",
    "retry_email_dispatches": "text, text, timestamptz",
}


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for statement in (*VIEWS.values(), *event_functions(), *dispatch_functions()):
            op.get_bind().exec_driver_sql(statement)


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for name, arguments in FUNCTIONS.items():
            op.execute(f"DROP FUNCTION {name}({arguments})")
        for name in VIEWS:
            op.execute(f"DROP VIEW {name}")


# ---- looking

VIEWS = {
    "failed_outbox_events": """
        CREATE VIEW failed_outbox_events AS
        SELECT id, event_name, attempts, claim_no AS tries_ever, doubts, held, last_error, created_at,
            updated_at AS failed_at
        FROM outbox_events WHERE status = 'failed'""",
    "failed_email_dispatches": """
        CREATE VIEW failed_email_dispatches AS
        SELECT id, "to", subject, batch_id, batch_index, attempts, claim_no AS tries_ever, doubts, held, error_message,
            created_at AT TIME ZONE 'UTC' AS created_at, updated_at AT TIME ZONE 'UTC' AS failed_at
        FROM email_dispatches WHERE status = 'failed'""",
    "import_progress": """
        CREATE VIEW import_progress AS
        WITH mails AS (
                SELECT batch_id, batch_index, status, held FROM email_dispatches WHERE batch_id IS NOT NULL),
            rejects AS (
                SELECT batch_id, item_index FROM dead_letters WHERE row_id IS NULL AND batch_id IS NOT NULL
                EXCEPT SELECT batch_id, batch_index FROM mails),
            repeats AS (
                SELECT batch_id, item_index FROM batch_duplicates
                EXCEPT SELECT batch_id, batch_index FROM mails
                EXCEPT SELECT batch_id, item_index FROM rejects),
            outcomes AS (
                SELECT batch_id, CASE WHEN status IN ('sent', 'failed') THEN status ELSE 'pending' END AS outcome, held
                FROM mails
                UNION ALL SELECT batch_id, 'rejected', false FROM rejects
                UNION ALL SELECT batch_id, 'duplicate', false FROM repeats)
        SELECT b.batch_id, b.total,
            count(*) FILTER (WHERE o.outcome = 'sent') AS sent,
            count(*) FILTER (WHERE o.outcome = 'pending') + greatest(b.total - count(o.outcome), 0) AS waiting,
            count(*) FILTER (WHERE o.outcome = 'failed') AS failed,
            count(*) FILTER (WHERE o.outcome = 'rejected') AS rejected,
            count(*) FILTER (WHERE o.outcome = 'duplicate') AS duplicate,
            count(*) FILTER (WHERE o.held) AS held,
            b.times_received, b.created_at AS received_at
        FROM import_batches AS b LEFT JOIN outcomes AS o ON o.batch_id = b.batch_id
        GROUP BY b.batch_id, b.total, b.times_received, b.created_at""",
    "processor_lag": """
        CREATE VIEW processor_lag AS
        SELECT processor, stream, partition, next_offset, end_offset,
            CASE WHEN end_offset < next_offset THEN 0 ELSE end_offset - next_offset END AS lag,
            seen_at AS end_seen_at, to_timestamp(last_timestamp_ms / 1000.0) AS last_record_at, paused, paused_reason,
            halted_reason
        FROM processor_offsets""",
}


# ---- retrying


def event_functions() -> list[str]:
    """`last_error` goes with the retry, as the model's method has it."""
    return [
        one("retry_outbox_event", "outbox_events", "outbox event", "last_error", "now()"),
        some(
            "retry_outbox_events",
            "outbox_events",
            "last_error",
            "now()",
            ("event text", "f.event_name = event"),
        ),
    ]


def dispatch_functions() -> list[str]:
    """Laravel's columns hold UTC without a zone."""
    clock = "now() AT TIME ZONE 'UTC'"
    return [
        one("retry_email_dispatch", "email_dispatches", "e-mail", "error_message", clock),
        some(
            "retry_email_dispatches",
            "email_dispatches",
            "error_message",
            clock,
            ("batch text", "f.batch_id LIKE batch || '%'"),
        ),
    ]


def one(name: str, table: str, what: str, error: str, clock: str) -> str:
    return f"""
    CREATE FUNCTION {name}(wanted bigint) RETURNS text LANGUAGE plpgsql AS $$
    DECLARE
        found {table}%ROWTYPE;
    BEGIN
        SELECT * INTO found FROM {table} WHERE id = wanted FOR UPDATE;
        IF found.id IS NULL THEN
            RAISE EXCEPTION 'there is no {what} %', wanted USING ERRCODE = 'no_data_found';
        ELSIF found.status IS NULL OR found.status = 'sent' THEN
            RAISE EXCEPTION '{what} % was sent: not retried', wanted USING ERRCODE = 'object_not_in_prerequisite_state';
        ELSIF found.held THEN
            RAISE EXCEPTION '{what} % is held, because it may have arrived: not retried', wanted
                USING ERRCODE = 'object_not_in_prerequisite_state';
        ELSIF found.lease_until > now() THEN
            RAISE EXCEPTION '{what} % is in progress until %: not retried', wanted, found.lease_until
                USING ERRCODE = 'object_in_use';
        END IF;
        UPDATE {table} SET status = 'pending', attempts = 0, {error} = NULL, next_attempt_at = NULL,
            updated_at = {clock} WHERE id = wanted;
        RETURN 'retried';
    END $$"""  # noqa: S608


def some(name: str, table: str, error: str, clock: str, own: tuple[str, str]) -> str:
    argument, condition = own
    return f"""
    CREATE FUNCTION {name}(
        {argument} DEFAULT NULL, error_like text DEFAULT NULL, failed_since timestamptz DEFAULT NULL)
    RETURNS TABLE (row_id bigint, result text) LANGUAGE sql AS $$
        WITH wanted AS (
                SELECT f.id, f.held FROM {table} AS f
                WHERE f.status = 'failed' AND ({argument.split()[0]} IS NULL OR {condition})
                    AND (error_like IS NULL OR f.{error} LIKE error_like)
                    AND (failed_since IS NULL OR f.updated_at >= {since(clock)})
                ORDER BY f.id FOR UPDATE),
            retried AS (
                UPDATE {table} AS t SET status = 'pending', attempts = 0, {error} = NULL, next_attempt_at = NULL,
                    updated_at = {clock} FROM wanted WHERE t.id = wanted.id AND NOT wanted.held)
        SELECT id, CASE WHEN held THEN 'held: not retried' ELSE 'retried' END FROM wanted ORDER BY id
    $$"""  # noqa: S608


def since(clock: str) -> str:
    return clock.replace("now()", "failed_since")
