"""Puts the newest whole runs into docs/performance.md, each between its two marks, and the plot beside it."""

import json
from collections.abc import Mapping
from typing import Any

from bench import outbox_report, plot, report
from bench.places import RESULTS, ROOT

PAGE = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "performance.svg"


def write() -> None:
    """Raises SystemExit when there is no whole run."""
    found = _newest("whole-2*.json", "make bench")
    _put("measured", section(found))
    PLOT.write_text(plot.rates(found["mail"]))


def write_outbox() -> None:
    """The same for the outbox."""
    _put("outbox", outbox_section(_newest("outbox-2*.json", "make bench-outbox")))


def _newest(pattern: str, command: str) -> dict[str, Any]:
    runs = sorted(RESULTS.glob(pattern))
    if not runs:
        raise SystemExit(f"bench: there is no such run in bench/results; run `{command}` first")
    found: dict[str, Any] = json.loads(runs[-1].read_text())
    return found


def _put(mark: str, text: str) -> None:
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    before, _, rest = PAGE.read_text().partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}\n\n{text}\n{end}{after}")


def section(found: Mapping[str, Any]) -> str:
    """The figures of the import job as Markdown."""
    parts = [_about(found), "![Mails per second](performance.svg)\n", *map(_table, report.tables(found))]
    return "\n".join([*parts, f"```json\n{json.dumps(report.summary(found))}\n```\n"])


def outbox_section(found: Mapping[str, Any]) -> str:
    """The figures of the outbox as Markdown."""
    parts = [_about(found), *map(_table, outbox_report.tables(found))]
    return "\n".join([*parts, f"```json\n{json.dumps(outbox_report.summary(found))}\n```\n"])


def _about(found: Mapping[str, Any]) -> str:
    about = "; ".join(f"{name}: {value}" for name, value in found["machine"].items())
    when = f"Measured {found['made']}, revision {found['commit']}, {found['rounds']} rounds"
    load = f"load before the start {found['load_before']:.1f}"
    if "load_after" in found:
        load += f", at the end {found['load_after']:.1f}"
    return f"{when}, {found['seconds'] / 60:.0f} minutes, {load}. {about}.\n"


def _table(made: tuple[str, list[str], list[list[str]]]) -> str:
    title, header, rows = made
    return "\n".join([f"**{title}**", "", _line(header), _line(["---"] * len(header)), *map(_line, rows), ""])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
