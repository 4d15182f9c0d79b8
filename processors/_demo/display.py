"""What one sees while the demo runs: bars on a terminal, plain lines elsewhere, and a table at the end."""

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from processors._demo.count import Result
from processors._status import BatchStatus, Status

DELIVERIES = {1: "first delivery", 2: "second delivery"}


class Display:
    """Shows how far each delivery is; a context manager that stops the bars at its end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<15}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[counts]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[int, TaskID] = {}
        self._said: dict[int, str] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        """One line, as it is."""
        self._console.print(line, markup=False)

    def show(self, delivery: int, status: Status) -> None:
        """Bring the display of this delivery up to date."""
        if not status.batches:
            return
        [batch] = status.batches
        settled, total = _settled(delivery, batch, status)
        if self._console.is_terminal:
            counts = _counts(batch, "sent", "waiting", "failed")
            if delivery not in self._tasks:
                self._tasks[delivery] = self._progress.add_task(DELIVERIES[delivery], total=total, counts=counts)
            self._progress.update(self._tasks[delivery], completed=settled, total=total, counts=counts)
        else:
            self._say_news(delivery, _counts(batch, "sent", "waiting", "failed", "rejected", "duplicate"))

    def _say_news(self, delivery: int, counts: str) -> None:
        if self._said.get(delivery) != counts:
            self._said[delivery] = counts
            self.say(f"{DELIVERIES[delivery]}: {counts}")

    def conclude(self, result: Result) -> None:
        """The table."""
        table = Table(show_header=False)
        for name, what in MEANINGS.items():
            table.add_row(what, f"{getattr(result, name):,}")
        self._console.print(table)


MEANINGS = {
    "received": "registrations received",
    "sent": "sent",
    "failed": "failed after three attempts",
    "rejected": "rejected: cannot be mailed",
    "duplicates_in_batch": "repeated in the batch",
    "suppressed_on_redelivery": "second delivery: messages that mailed nobody",
    "mails_at_sink": "mails at the mail server",
    "mailed_twice": "mailed twice",
}


def _settled(delivery: int, batch: BatchStatus, status: Status) -> tuple[int, int]:
    """Registrations with an outcome, of all; in a redelivery all have one, so it is records read to their ends."""
    if delivery == 1:
        return batch.total - batch.waiting, batch.total
    if batch.times_received < delivery:
        return 0, 1
    ends = sum(p.end or 0 for p in status.processors)
    return ends - sum(p.lag_records or 0 for p in status.processors), ends


def _counts(batch: BatchStatus, *names: str) -> str:
    return ", ".join(f"{getattr(batch, name):,} {name}" for name in names)
