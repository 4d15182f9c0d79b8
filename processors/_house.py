"""What the processors of one process share: the settings, the log, the database, the metrics; opened and closed here.

And what is said when one of them does not answer. Not here: the processors (`_compose.py`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from processors._migrate import current_is_head
from processors._settings import Settings
from streams.breaker import BreakerPolicy
from streams.database import connect, is_away
from streams.errors import BadSettings, DatabaseAway, LogError, NotMigrated
from streams.log import Log
from streams.logs import open_log
from streams.processor import Limits
from streams.recovery import RecoveryPolicy
from streams.sql import Database
from streams.telemetry import Metrics

log = structlog.get_logger(__name__)

LOG_AWAY_SECONDS = 60.0
"""How long a start waits for a log that does not answer, before it leaves the waiting to whoever started it."""


@dataclass(frozen=True, slots=True)
class House:
    """What the processors of one process share."""

    settings: Settings
    log: Log
    engine: AsyncEngine
    metrics: Metrics
    checks: dict[str, Callable[[], str | None]] = field(default_factory=dict)
    """What a processor needs beyond log and database, by its name: None while it has it, else what keeps it."""

    @property
    def limits(self) -> Limits:
        return limits(self.settings)


def limits(settings: Settings) -> Limits:
    """The bounds of a process, as the settings have them."""
    s = settings
    return Limits(
        turn_records=s.turn_records,
        slots=s.slots,
        in_doubt=s.in_doubt,
        recovery=RecoveryPolicy(s.max_attempts, s.backoff_seconds, s.backoff_jitter, s.on_unknown_outcome),
        breaker=BreakerPolicy(s.breaker_threshold, s.breaker_probe_seconds, s.breaker_probe_max_seconds),
        act_timeout=s.act_timeout_seconds,
        reply_timeout=s.reply_timeout,
        commit_allowance=s.commit_allowance_seconds,
        lease=s.lease,
        idle_look=s.idle_look_seconds,
        visibility=s.queued_visibility_seconds,
        rate_per_second=s.smtp_rate_per_second,
        relay_batch=s.relay_batch,
        relay_poll=s.relay_poll_seconds,
        repeat_lag_limit=s.repeat_lag_limit,
    )


def outbox_limits(settings: Settings) -> Limits:
    """The same for events: their requests are short, their retries few and close together, and none is ever held."""
    s = settings
    return replace(
        limits(s),
        slots=s.outbox_slots,
        in_doubt=s.outbox_slots,
        recovery=RecoveryPolicy(s.outbox_max_attempts, (s.outbox_retry_seconds,), 0.0),
        act_timeout=s.outbox_act_timeout,
        reply_timeout=s.outbox_act_timeout,
        lease=s.outbox_lease,
        rate_per_second=None,
    )


def repayments_limits(settings: Settings) -> Limits:
    """The same for repayments: few at once, and never held, for who tries again looks at the gateway first."""
    s = settings
    return replace(
        limits(s),
        slots=s.repayments_slots,
        in_doubt=s.repayments_slots,
        recovery=RecoveryPolicy(s.max_attempts, s.backoff_seconds, s.backoff_jitter),
        reply_timeout=s.asaas_timeout,
        rate_per_second=None,
    )


def connect_log(settings: Settings, label: str) -> Log:
    """The log of LOG_URL, not opened yet. `label` is what a broker shows of this connection."""
    return open_log(
        settings.log_url.get_secret_value(),
        ca_file=settings.log_ca_file,
        heartbeat=settings.log_heartbeat_seconds,
        label=label,
    )


@asynccontextmanager
async def open_house(
    settings: Settings, label: str, metrics: Metrics, *, database: bool = True, needs_log: bool = True
) -> AsyncIterator[House]:
    """Everything opened that processors share, closed again at the end of the block.

    Waits for a database or a log that does not answer yet; without `database` nothing here uses one, and nobody asks.
    Without `needs_log` it is not opened: whoever wants it opens it.
    Raises BadSettings, DatabaseAway, NotMigrated, LogError and LogRefused.
    """
    engine = connect(settings.database_url.get_secret_value(), label, pool_size=10)
    source = connect_log(settings, label)
    try:
        if database:
            await _check_database(engine, limits(settings).database_away)
        if needs_log:
            await _open_patiently(source)
        yield House(settings, source, engine, metrics)
    finally:
        await source.close()
        await engine.dispose()


async def _check_database(engine: AsyncEngine, away_seconds: float) -> None:
    with database_errors():
        await Database(engine, away_seconds).patiently(lambda sql: sql.fetch("SELECT 1"))
        await check_migrated(engine)


async def check_migrated(engine: AsyncEngine) -> None:
    """Raise NotMigrated unless the database is at the newest revision."""
    if not await current_is_head(engine):
        raise NotMigrated("the database has not the tables that this release needs; run `afluente migrate` first")


@contextmanager
def database_errors() -> Iterator[None]:
    """Name what a database answers to somebody who is not let in, or does not answer at all.

    Raises DatabaseAway, and BadSettings for a wrong password or a database that does not exist.
    """
    try:
        yield
    except (DBAPIError, OSError, TimeoutError) as error:
        cause = getattr(error, "orig", None) or error
        if is_away(error):
            raise DatabaseAway(f"the database does not answer: {type(cause).__name__}") from error
        if str(getattr(cause, "sqlstate", "")).startswith(_NOT_LET_IN):
            raise BadSettings(f"DATABASE_URL: the server refuses: {cause}") from error
        raise


_NOT_LET_IN = ("28", "3D")
"""Classes of SQLSTATE (PostgreSQL, appendix A): invalid authorization, no such database."""


async def _open_patiently(source: Log) -> None:
    loop, delay = asyncio.get_running_loop(), 0.5
    give_up = loop.time() + LOG_AWAY_SECONDS
    while True:
        try:
            return await source.open()
        except LogError as error:
            if loop.time() + delay > give_up:
                raise
            log.warning("log.away", error=str(error), again_in=delay)
        await asyncio.sleep(delay)
        delay = min(delay * 2, 5.0)
