"""Log lines and metrics."""

import io
import json
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog
from prometheus_client import CollectorRegistry

from streams.assignment import Assignment, Entry, Window
from streams.log import Bounds, Partition
from streams.offsets import Position
from streams.telemetry import LogFormat, Metrics, configure_logging

Lines = Callable[..., list[str]]


@pytest.fixture
def configured() -> Iterator[Callable[[LogFormat, str], io.StringIO]]:
    """Logging as a process sets it up, into a buffer; put back afterwards."""
    root, before = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers[:], root.level

    def configure(form: LogFormat, level: str = "INFO") -> io.StringIO:
        buffer = io.StringIO()
        configure_logging(level, form, buffer)
        return buffer

    yield configure
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.configure(**before)


def fail_for_ana(log: Any) -> None:
    """Log a caught error whose text and locals hold personal data."""
    name = "Ana Secret"
    try:
        int(f"refused: ana.secret@example.com, {len(name)} letters")
    except ValueError:
        log.exception("send failed for ana.secret@example.com")


def test_line_is_json_with_its_context_when_machines_read(configured: Callable[..., io.StringIO]) -> None:
    """Level, time, logger, the bound processor and the fields of the call."""
    buffer = configured("json")
    with structlog.contextvars.bound_contextvars(processor="mailer", partition=2):
        structlog.get_logger("streams.some").info("row.sent", row_id=5)
    line = json.loads(buffer.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "row.sent",
        "level": "info",
        "logger": "streams.some",
        "processor": "mailer",
        "partition": 2,
        "row_id": 5,
    }


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize("logger", [structlog.get_logger, logging.getLogger])
def test_no_line_names_anyone_when_an_error_does(
    configured: Callable[..., io.StringIO], form: LogFormat, logger: Callable[[str], Any]
) -> None:
    """Neither the message nor the text of the exception nor the local variables; ours and libraries' lines alike."""
    buffer = configured(form)
    fail_for_ana(logger("some.library"))
    text = buffer.getvalue()
    assert "ValueError" in text
    assert "a***@e***" in text
    assert "secret" not in text.lower()


def test_nested_and_personal_fields_are_hidden(configured: Callable[..., io.StringIO]) -> None:
    """Fields are masked in depth, and removed when their name says that they are personal."""
    buffer = configured("json")
    structlog.get_logger("x").warning("odd", rows=[{"to": "x", "why": "ana@example.com"}], agent_name="Ana Secret")
    line = json.loads(buffer.getvalue())
    assert line["rows"] == [{"to": "[removed]", "why": "a***@e***"}]
    assert line["agent_name"] == "[removed]"


def test_lines_below_the_level_are_dropped(configured: Callable[..., io.StringIO]) -> None:
    """The level counts for our lines and for those of libraries; the chatty ones need a warning."""
    buffer = configured("json", "INFO")
    structlog.get_logger("x").debug("no")
    logging.getLogger("some.library").debug("no")
    logging.getLogger("rstream").info("no")
    assert buffer.getvalue() == ""
    logging.getLogger("rstream").warning("yes")
    assert json.loads(buffer.getvalue())["event"] == "yes"


# ---- metrics


def assignment(**changes: object) -> Assignment:
    """What Metrics.lag looks at."""
    position = Position(
        next_offset=10, epoch=0, paused=False, paused_reason=None, halted_reason=None, starts=0, last_timestamp_ms=None
    )
    facts: dict[str, object] = {
        "partition": Partition("recipients", 1, "recipients-1"),
        "position": position,
        "bounds": Bounds(0, 30),
        "window": Window(10),
        "active": True,
    }
    return cast(Assignment, SimpleNamespace(**(facts | changes)))


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """What /metrics shows, None if there is no such series."""
    return metrics.registry.get_sample_value(name, labels)


PARTITION = {"processor": "mailer", "stream": "recipients", "partition": "1"}


def test_work_is_counted_by_processor_and_outcome() -> None:
    """Each method moves its own series in the registry it was given."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.records("mailer", 3, 1, waiting=2)
    metrics.acted("mailer", "sent")
    metrics.act_seconds("mailer", 0.2)
    metrics.committed("mailer", 0.01, 16)
    metrics.dead_letter("mailer", "rejected")
    metrics.relayed("recipients", 5)
    metrics.reconnected("log")
    metrics.busy("mailer", 4, 2)
    metrics.breaker_open("mailer", True)
    metrics.turned(-0.1)
    assert metrics.registry is registry
    outcomes = {o: value(metrics, "afluente_records_total", processor="mailer", outcome=o) for o in ("done", "dead")}
    assert outcomes == {"done": 3, "dead": 1}
    assert value(metrics, "afluente_acts_total", processor="mailer", outcome="sent") == 1
    assert value(metrics, "afluente_act_seconds_count", processor="mailer") == 1
    assert value(metrics, "afluente_commit_group_size_sum", processor="mailer") == 16
    assert value(metrics, "afluente_dead_letters_total", processor="mailer", reason="rejected") == 1
    assert value(metrics, "afluente_relay_published_total", stream="recipients") == 5
    assert value(metrics, "afluente_reconnects_total", service="log") == 1
    assert value(metrics, "afluente_in_flight", processor="mailer") == 4
    assert value(metrics, "afluente_in_doubt", processor="mailer") == 2
    assert value(metrics, "afluente_breaker_open", processor="mailer") == 1
    assert value(metrics, "afluente_loop_lag_seconds_sum") == 0


def test_lag_is_the_age_of_the_oldest_unsettled_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """In records up to the end of the partition, in seconds since the oldest one that the offset has not passed."""
    monkeypatch.setattr("time.time", lambda: 100.0)
    metrics = Metrics()
    window = Window(10)
    window.entries.append(Entry(10, 70_000))
    metrics.lag("mailer", assignment(window=window))
    assert value(metrics, "afluente_lag_records", **PARTITION) == 20
    assert value(metrics, "afluente_lag_seconds", **PARTITION) == 30
    assert value(metrics, "afluente_partition_halted", **PARTITION) == 0


def test_lag_is_nothing_when_all_is_settled() -> None:
    """A quiet night is no lag, however old the last record is."""
    metrics = Metrics()
    metrics.lag("mailer", assignment(bounds=Bounds(0, 10)))
    assert value(metrics, "afluente_lag_records", **PARTITION) == 0
    assert value(metrics, "afluente_lag_seconds", **PARTITION) == 0


def test_series_of_a_partition_vanish_when_another_process_reads_it() -> None:
    """A last value that stays for ever would be a false alarm."""
    metrics = Metrics()
    metrics.lag("mailer", assignment())
    metrics.lag("mailer", assignment(active=False))
    metrics.lag("mailer", assignment(active=False))
    assert value(metrics, "afluente_lag_records", **PARTITION) is None
    assert value(metrics, "afluente_partition_halted", **PARTITION) is None
