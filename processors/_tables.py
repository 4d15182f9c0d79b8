"""`status` as tables for people."""

from collections.abc import Iterator, Mapping

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table

from processors._status import BatchStatus, PartitionStatus, Status


def tables(status: Status) -> Iterator[RenderableType]:
    """What to print, one after the other."""
    yield _processors(status)
    yield _batches(status)
    yield _numbers("rows", status.rows)
    yield _numbers("events", status.events)
    yield _numbers("requests for repayments", status.requests)
    yield f"in doubt: {status.in_doubt:,} (may have been mailed twice, or outcome not known yet); held: {status.held:,}"
    yield _numbers("dead letters", status.dead_letters)


def duration(seconds: float | None) -> str:
    """Seconds as people say them; a dash where nobody knows."""
    if seconds is None:
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


def _processors(status: Status) -> Table:
    table = _table("processors")
    for name in ("processor", "stream", "partition"):
        table.add_column(name)
    for name in ("offset", "end", "lag", "age"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for p in status.processors:
        table.add_row(
            p.processor,
            p.stream,
            str(p.partition),
            *(_number(value) for value in (p.offset, p.end, p.lag_records)),
            duration(p.lag_seconds),
            _state(p),
        )
    return table


def _state(p: PartitionStatus) -> str:
    if p.halted_reason:
        return f"HALTED: {p.halted_reason}"
    if p.paused:
        return f"paused: {p.paused_reason}" if p.paused_reason else "paused"
    return "never started" if p.offset is None else ""


def _batches(status: Status) -> Table:
    table = _table("batches: total = sent + waiting + failed + rejected + duplicate")
    table.add_column("batch", no_wrap=True)
    for name in ("total", "sent", "waiting", "failed", "rejected", "duplicate", "times"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("received first (UTC)", no_wrap=True)
    table.add_column("state")
    for b in status.batches:
        numbers = (b.total, b.sent, b.waiting, b.failed, b.rejected, b.duplicate)
        at = f"{b.received_at:%Y-%m-%d %H:%M:%S}"
        table.add_row(b.batch_id[:12], *map(_number, numbers), str(b.times_received), at, _batch_state(b))
    return table


def _batch_state(b: BatchStatus) -> str:
    if not b.adds_up:
        return "DOES NOT ADD UP"
    if b.held:
        return f"{b.held} held"
    return "complete" if b.complete else ""


def _numbers(name: str, numbers: Mapping[str, int]) -> str:
    return f"{name}: " + (", ".join(f"{number:,} {what}" for what, number in numbers.items()) or "none")


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
