"""Puts the newest whole run into docs/performance.md, between its two marks, and the plot beside it."""

import json
from collections.abc import Mapping
from typing import Any

from bench import plot, report
from bench.places import RESULTS, ROOT

PAGE = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "performance.svg"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def write() -> None:
    """Raises SystemExit when there is no whole run."""
    runs = sorted(RESULTS.glob("whole-*.json"))
    if not runs:
        raise SystemExit("bench: there is no whole run in bench/results; run `make bench` first")
    found = json.loads(runs[-1].read_text())
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{section(found)}\n{END}{after}")
    PLOT.write_text(plot.rates(found["mail"]))


def section(found: Mapping[str, Any]) -> str:
    """The figures as Markdown."""
    about = "; ".join(f"{name}: {value}" for name, value in found["machine"].items())
    when = f"Measured {found['made']}, revision {found['commit']}, {found['rounds']} rounds"
    length = f"{found['seconds'] / 60:.0f} minutes, load before the start {found['load_before']:.1f}"
    parts = [f"{when}, {length}. {about}.\n", "![Mails per second](performance.svg)\n"]
    for title, header, rows in report.tables(found):
        lines = [f"**{title}**", "", _line(header), _line(["---"] * len(header)), *map(_line, rows), ""]
        parts.append("\n".join(lines))
    parts.append(f"```json\n{json.dumps(report.summary(found))}\n```\n")
    return "\n".join(parts)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
