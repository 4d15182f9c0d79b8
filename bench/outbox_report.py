"""From the runs of the outbox to figures: medians with their range, ratios round by round, tables, and one line."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.report import spread

PRODUCT, POLLER, JOBS = "afluente", "poller + aiohttp", "procrastinate + aiohttp"
PEERS = (POLLER, JOBS)

GOALS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "ratio_to_best_peer": ("at least 1.0", lambda x: x >= 1.0),
    "p50_ms": ("at most 4", lambda x: x <= 4),
    "p99_ms": ("at most 8", lambda x: x <= 8),
    "growth_mb": ("flat: below 5", lambda x: x < 5),
    "repeated": ("0", lambda x: x == 0),
}


def summary(found: Mapping[str, Any]) -> dict[str, float]:
    """Medians; the ratio is to the fastest peer, round by round."""
    runs, memory = found["runs"], found["memory"]
    best = [max(each) for each in zip(*([run["drain_per_s"] for run in runs[name]] for name in PEERS), strict=True)]
    ours = runs[PRODUCT]
    ratio = statistics.median(run["drain_per_s"] / peer for run, peer in zip(ours, best, strict=True))
    return {
        "drain_events_per_s": round(statistics.median(run["drain_per_s"] for run in ours)),
        "ratio_to_best_peer": round(ratio, 3),
        "p50_ms": round(statistics.median(run["p50_ms"] for run in ours), 2),
        "p99_ms": round(statistics.median(run["p99_ms"] for run in ours), 2),
        "peak_mb": round(memory["peak_mb"], 1),
        "growth_mb": round(memory["late_mb"] - memory["early_mb"], 1),
        "repeated": sum(run["repeated"] for run in ours) + memory["repeated"],
    }


def tables(found: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Titles, headers and rows of text, for the terminal and for the page."""
    return [_programs(found["runs"]), _rounds(found["runs"]), _backlog(found["memory"]), _goals(summary(found))]


def show(found: Mapping[str, Any]) -> None:
    """Print all tables."""
    console = Console(width=None if Console().is_terminal else 160)
    for title, header, rows in tables(found):
        table = Table(*header, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)


Runs = Mapping[str, list[Mapping[str, Any]]]


def _programs(runs: Runs) -> tuple[str, list[str], list[list[str]]]:
    figures = {"drain_per_s": ",.0f", "cpu": ".3f", "p50_ms": ".1f", "p99_ms": ".1f"}
    header = ["program", "events/s", "CPU s/1,000", "p50 ms", "p99 ms", "repeated"]
    rows = []
    for name, each in runs.items():
        cells = [spread([run[figure] for run in each], form) for figure, form in figures.items()]
        rows.append([name, *cells, str(sum(run["repeated"] for run in each))])
    return "Events: median (range) of the rounds", header, rows


def _rounds(runs: Runs) -> tuple[str, list[str], list[list[str]]]:
    ours = runs[PRODUCT]
    rows = []
    for peer in PEERS:
        pairs = list(zip(ours, runs[peer], strict=True))
        cells = [" ".join(f"{a[f] / b[f]:.2f}" for a, b in pairs) for f in ("drain_per_s", "p50_ms", "p99_ms")]
        rows.append([f"{PRODUCT} / {peer}", *cells])
    return "Product to peer, each round", ["pair", "events/s", "p50", "p99"], rows


def _backlog(memory: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    rows = [
        ["resident, first quarter", f"{memory['early_mb']:.0f} MB"],
        ["resident, last quarter", f"{memory['late_mb']:.0f} MB"],
        ["peak", f"{memory['peak_mb']:.0f} MB"],
        ["posted / repeated", f"{memory['posted']:,} / {memory['repeated']}"],
    ]
    title = f"Backlog of {memory['events']:,}, drained in {memory['seconds']:.0f} s: the larger of the two processes"
    return title, ["what", "figure"], rows


def _goals(line: Mapping[str, float]) -> tuple[str, list[str], list[list[str]]]:
    rows = [
        [name, goal, f"{line[name]:,}", "met" if met(line[name]) else "MISSED"] for name, (goal, met) in GOALS.items()
    ]
    return "Goals of the outbox", ["figure", "goal", "measured", ""], rows
