"""What a process tells about itself: log lines, Prometheus metrics, and final failures to Sentry.

None of them carries an address, a name or a secret. Lines and events are masked (`masking.py`) on their way out, but
names cannot be recognised: do not log them. Probes and the `/metrics` server are `process.py`'s business.

A task that works for one processor says so once, and all its lines carry it:
`with structlog.contextvars.bound_contextvars(processor=..., partition=...)`.
"""

import logging
import re
import sys
import time
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TextIO

import structlog
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from structlog.typing import EventDict, Processor, WrappedLogger

from streams.errors import Retry, StreamsError
from streams.masking import PERSONAL_KEYS, REMOVED, mask, mask_value

if TYPE_CHECKING:
    from sentry_sdk.types import Event, Hint

    from streams.assignment import Assignment

LogFormat = Literal["auto", "console", "json"]

# ---- logs

_INTERNAL = frozenset({"_record", "_from_structlog", "exc_info", "stack_info"})
_NOISY = ("rstream", "aiosqlite", "asyncio")
"""Libraries that log their ordinary work at INFO or report what we handle: their warnings are enough."""


def configure_logging(level: str = "INFO", form: LogFormat = "auto", stream: TextIO | None = None) -> None:
    """Send our own and all libraries' lines through one masked formatter to `stream` (stderr: stdout is for results).

    `auto` writes for people on a terminal and JSON elsewhere. Calling it again replaces what was set before.
    """
    target = stream or sys.stderr
    console = form == "console" or (form == "auto" and target.isatty())
    handler = logging.StreamHandler(target)
    handler.setFormatter(_formatter(console, colors=target.isatty()))
    logging.basicConfig(handlers=[handler], level=level, force=True)
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level]))
    structlog.configure(
        processors=[*_shared_steps(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def _shared_steps() -> list[Processor]:
    """What happens to every line. Masking comes last, so that it sees the text of exceptions and the bound context."""
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        mask_event,
    ]


def _formatter(console: bool, colors: bool) -> logging.Formatter:
    # The plain traceback: the rich one would print the local variables of every frame, which are people's data.
    plain = structlog.dev.plain_traceback
    renderer: Processor = structlog.processors.JSONRenderer(ensure_ascii=False)
    if console:
        renderer = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_shared_steps(),
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )


def mask_event(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Mask every value of a log line; the value of a field that is personal by its name is removed altogether."""
    for key, value in event.items():
        if key in PERSONAL_KEYS:
            event[key] = REMOVED
        elif key not in _INTERNAL:
            event[key] = mask_value(value)
    return event


# ---- metrics

_ACT_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_COMMIT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)
_GROUP_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_LOOP_LAG_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30)
_PARTITION = ("processor", "stream", "partition")


class Metrics:
    """All metrics of one process, in one registry that `/metrics` shows and that tests read."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self._declare_work()
        self._declare_state()
        self._know_labels()

    def records(self, processor: str, done: int, dead: int = 0, waiting: int = 0) -> None:
        """So many records were settled: done, laid to rest, or waiting in a row for a time or for somebody else."""
        for outcome, count in (("done", done), ("dead", dead), ("waiting", waiting)):
            if count:
                self._records_of(processor, outcome).inc(count)

    def acted(self, processor: str, outcome: str, count: int = 1) -> None:
        """So many acts ended as: sent, retry, failed, unknown (perhaps accepted), dropped (its lease was over)."""
        self._acts_of(processor, outcome).inc(count)

    def act_seconds(self, processor: str, seconds: float) -> None:
        """How long one act took, whatever came of it."""
        self._act_seconds_of(processor).observe(seconds)

    def committed(self, processor: str, seconds: float, outcomes: int) -> None:
        """A transaction with so many outcomes took so long."""
        self._commit_seconds_of(processor).observe(seconds)
        self._group_size_of(processor).observe(outcomes)

    def busy(self, processor: str, in_flight: int, in_doubt: int) -> None:
        """How many rows are being acted upon, and how many of them are between their final dot and their commit."""
        self._in_flight_of(processor).set(in_flight)
        self._in_doubt_of(processor).set(in_doubt)

    def breaker_open(self, processor: str, is_open: bool) -> None:
        """Whether the provider counts as away, so that nothing is claimed."""
        self._breaker_open.labels(processor).set(is_open)

    def dead_letter(self, processor: str, reason: str, count: int = 1) -> None:
        """So many dead letters were written; `reason` is one of a few codes, never a text."""
        self._dead_letters.labels(processor, reason).inc(count)

    def relayed(self, stream: str, count: int) -> None:
        """So many messages of due rows were published with a confirm."""
        self._relayed.labels(stream).inc(count)

    def reconnected(self, service: Literal["log", "amqp", "smtp", "database"]) -> None:
        """A lost connection was made anew."""
        self._reconnects.labels(service).inc()

    def lag(self, processor: str, assignment: "Assignment") -> None:
        """How far a partition is behind, and whether it is halted; nothing while another process reads it.

        The seconds are the age of the oldest record that was read and is not settled, or else of the last settled one.
        """
        labels = (processor, assignment.partition.stream, str(assignment.partition.index))
        position, bounds, window = assignment.position, assignment.bounds, assignment.window
        if position is None or bounds is None or not assignment.active:
            self._forget(*labels)
            return
        records = max(0, bounds.next - window.next_offset)
        oldest = window.entries[0].timestamp_ms if window.entries else position.last_timestamp_ms
        seconds = max(0.0, time.time() - oldest / 1000) if records and oldest is not None else 0.0
        self._lag_records.labels(*labels).set(records)
        self._lag_seconds.labels(*labels).set(seconds)
        self._halted.labels(*labels).set(bool(position.halted_reason))

    def turned(self, late: float) -> None:
        """The event loop turned, `late` seconds after it should have."""
        self._heartbeat.set_to_current_time()
        self._loop_lag.observe(max(0.0, late))

    def _forget(self, processor: str, stream: str, partition: str) -> None:
        # The last value of a partition that moved to another pod would be a false alarm for ever.
        labels = {"processor": processor, "stream": stream, "partition": partition}
        for gauge in (self._lag_records, self._lag_seconds, self._halted):
            gauge.remove_by_labels(labels)

    def _declare_work(self) -> None:
        r, by = self.registry, ("processor",)
        self._records = Counter("afluente_records_total", "Records settled", ("processor", "outcome"), registry=r)
        self._acts = Counter("afluente_acts_total", "Acts recorded", ("processor", "outcome"), registry=r)
        self._act_seconds = Histogram(
            "afluente_act_seconds", "Duration of an act", by, buckets=_ACT_SECONDS, registry=r
        )
        self._commit_seconds = Histogram(
            "afluente_commit_seconds", "Duration of a commit", by, buckets=_COMMIT_SECONDS, registry=r
        )
        self._group_size = Histogram(
            "afluente_commit_group_size", "Outcomes in a commit", by, buckets=_GROUP_SIZES, registry=r
        )
        self._dead_letters = Counter(
            "afluente_dead_letters_total", "Dead letters written", ("processor", "reason"), registry=r
        )
        self._relayed = Counter("afluente_relay_published_total", "Due rows published", ("stream",), registry=r)
        self._reconnects = Counter("afluente_reconnects_total", "Connections made anew", ("service",), registry=r)

    def _know_labels(self) -> None:
        """Those that every act and every commit asks for: `labels` would cost 2 us each time."""
        self._records_of, self._acts_of = cache(self._records.labels), cache(self._acts.labels)
        self._act_seconds_of = cache(self._act_seconds.labels)
        self._commit_seconds_of, self._group_size_of = (
            cache(self._commit_seconds.labels),
            cache(self._group_size.labels),
        )
        self._in_flight_of, self._in_doubt_of = cache(self._in_flight.labels), cache(self._in_doubt.labels)

    def _declare_state(self) -> None:
        r, by = self.registry, ("processor",)
        self._lag_records = Gauge("afluente_lag_records", "Records not yet settled", _PARTITION, registry=r)
        self._lag_seconds = Gauge("afluente_lag_seconds", "Age of the oldest not settled", _PARTITION, registry=r)
        self._halted = Gauge("afluente_partition_halted", "1: stopped until a person acts", _PARTITION, registry=r)
        self._in_flight = Gauge("afluente_in_flight", "Rows being acted upon", by, registry=r)
        self._in_doubt = Gauge("afluente_in_doubt", "Acts between final dot and commit", by, registry=r)
        self._breaker_open = Gauge("afluente_breaker_open", "1: provider away, nothing is claimed", by, registry=r)
        self._heartbeat = Gauge("afluente_heartbeat_timestamp_seconds", "When the loop turned last", registry=r)
        self._loop_lag = Histogram(
            "afluente_loop_lag_seconds", "How late the event loop wakes up", buckets=_LOOP_LAG_SECONDS, registry=r
        )


# ---- Sentry

FLUSH_SECONDS = 2.0
"""How long the end of a process waits for reports under way."""

_WITHHELD = "(text withheld: it may name a person; see the log or the row)"
_REPLY_CODE = re.compile(r"^\d{3}(?:[ -]\d\.\d{1,3}\.\d{1,3})?(?= |$|-)")
_KEPT = {"event_id", "timestamp", "level", "platform", "release", "environment", "server_name", "sdk"}
_KEPT_OF_FRAME = {"filename", "abs_path", "function", "module", "lineno", "in_app"}
_KEPT_OF_MECHANISM = {"type", "handled", "exception_id", "parent_id", "is_exception_group", "source"}


def init_sentry(dsn: str | None, environment: str, release: str) -> None:
    """Report to this DSN from now on; without one nothing is ever sent.

    Nothing is collected that we do not need: no local variables, source lines, breadcrumbs, requests, spans or
    arguments, and no integration that would report a log line a second time. (`send_default_pii` is off by itself; the
    SDK deprecates naming it.)
    """
    if not dsn:
        return
    import sentry_sdk  # noqa: PLC0415 - 5 MB, with an HTTP library, that nobody needs without a DSN
    from sentry_sdk.integrations.atexit import AtexitIntegration  # noqa: PLC0415

    sentry_sdk.init(
        dsn,
        environment=environment,
        release=release,
        include_local_variables=False,
        include_source_context=False,
        max_breadcrumbs=0,
        max_request_body_size="never",
        default_integrations=False,
        auto_enabling_integrations=False,
        integrations=[AtexitIntegration(callback=lambda *_: None)],
        auto_session_tracking=False,
        send_client_reports=False,
        shutdown_timeout=FLUSH_SECONDS,
        transport_queue_size=1000,
        before_send=scrub,
        before_send_transaction=lambda *_: None,
    )


def capture_final_failure(error: BaseException, *, processor: str, key: str | None, row_id: int) -> None:
    """Report once that a row is failed for good, by its key and id. Never raises; failures alike are one issue."""
    tags = {"processor": processor, "key": key or "", "row_id": str(row_id)}
    cause = getattr(error, "fault", None) or getattr(error, "reason", None) or _reply_code(str(error)) or ""
    _capture(error, tags, [processor, type(error).__name__, mask(cause)])


def capture_failure(error: BaseException, *, processor: str) -> None:
    """Report an error that a processor could handle, but that a person should know of. Never raises."""
    reason = getattr(error, "reason", None) or ""
    _capture(error, {"processor": processor}, [processor, type(error).__name__, mask(reason)])


def capture_crash(error: BaseException) -> None:
    """Report an error that ends the process. Never raises."""
    _capture(error, {}, None)


def flush_reports() -> None:
    """Wait a bounded time for reports under way; for ends of a process that skip Python's own."""
    if (sentry := _sentry()) is not None:
        sentry.flush(timeout=FLUSH_SECONDS)


def _sentry() -> Any:
    """The SDK, if it was ever loaded and initialised."""
    sentry = sys.modules.get("sentry_sdk")
    return sentry if sentry is not None and sentry.is_initialized() else None


def _capture(error: BaseException, tags: dict[str, str], fingerprint: list[str] | None) -> None:
    if (sentry := _sentry()) is None:
        return
    try:
        with sentry.new_scope() as scope:
            scope.fingerprint = fingerprint
            for name, value in tags.items():
                scope.set_tag(name, value)
            scope.capture_exception(error)
    except Exception:
        structlog.get_logger(__name__).warning("sentry.not_reported", error=type(error).__name__)


def scrub(event: "Event", _hint: "Hint") -> "Event | None":
    """The event rebuilt from what is known to be harmless; what is not named here does not leave the process."""
    clean: dict[str, Any] = {name: value for name, value in event.items() if name in _KEPT}
    values = (event.get("exception") or {}).get("values") or []
    clean["exception"] = {"values": [_clean_exception(value) for value in values]}
    clean["tags"] = {str(name): mask(str(value)) for name, value in dict(event.get("tags") or {}).items()}
    if event.get("fingerprint"):
        clean["fingerprint"] = [mask(part) for part in event["fingerprint"]]
    return clean  # type: ignore[return-value]  # a TypedDict cannot be built key by key


def _clean_exception(value: dict[str, Any]) -> dict[str, Any]:
    frames = (value.get("stacktrace") or {}).get("frames") or []
    clean = {"type": value.get("type"), "module": value.get("module"), "value": _clean_text(value)}
    clean["mechanism"] = {k: v for k, v in (value.get("mechanism") or {}).items() if k in _KEPT_OF_MECHANISM}
    if frames:
        clean["stacktrace"] = {"frames": [{k: v for k, v in f.items() if k in _KEPT_OF_FRAME} for f in frames]}
    return clean


def _clean_text(value: dict[str, Any]) -> str:
    """Only our own errors promise a text without personal data, and not Retry: it may quote what a server said."""
    text, ours = str(value.get("value") or ""), value.get("module") == StreamsError.__module__
    if ours and value.get("type") != Retry.__name__:
        return mask(text)
    return f"{_reply_code(text)} {_WITHHELD}".lstrip()


def _reply_code(text: str) -> str:
    found = _REPLY_CODE.match(text)
    return found[0] if found else ""
