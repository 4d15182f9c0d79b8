"""A bar chart as SVG: the median of each case with a line from the lowest to the highest round. No library needed."""

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, LEFT, ROW, BAR = 760, 290, 30, 18
OURS, THEIRS = "#0f6b5f", "#9aa8a6"


def rates(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Mails per second of all cases."""
    most = max(run["rate"] for each in runs.values() for run in each)
    scale = (WIDTH - LEFT - 90) / most
    rows = [_row(y, name, [run["rate"] for run in each], scale) for y, (name, each) in enumerate(runs.items())]
    height = ROW * len(rows) + 50
    title = (
        '<text x="10" y="22" font-size="15" font-weight="bold">Mails per second (line: lowest to highest round)</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="Helvetica, Arial, sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{title}\n' + "\n".join(rows) + "\n</svg>\n"
    )


def _row(number: int, name: str, values: Sequence[float], scale: float) -> str:
    y, middle = 40 + number * ROW, statistics.median(values)
    low, high = (LEFT + edge * scale for edge in (min(values), max(values)))
    colour = THEIRS if "FastStream" in name else OURS
    line = y + BAR / 2
    return (
        f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>'
        f'<rect x="{LEFT}" y="{y}" width="{middle * scale:.1f}" height="{BAR}" fill="{colour}"/>'
        f'<path d="M{low:.1f} {line}H{high:.1f}" stroke="#22302e" stroke-width="1.5"/>'
        f'<text x="{max(high, LEFT + middle * scale) + 6:.1f}" y="{y + 13}">{middle:,.0f}</text>'
    )
