"""What the bench of the outbox concludes from its runs."""

from typing import Any

from bench import docs, outbox_report
from bench.outbox_report import JOBS, POLLER, PRODUCT


def runs(*rates: float, p50: float = 3.0) -> list[dict[str, Any]]:
    """A round of each rate."""
    return [
        {"drain_per_s": rate, "cpu": 0.2, "p50_ms": p50, "p99_ms": 7.0, "missing": 0, "repeated": 0} for rate in rates
    ]


def found() -> dict[str, Any]:
    """Three rounds; the machine is half as fast in the second."""
    return {
        "made": "2026-12-01 02:00 UTC",
        "commit": "abc",
        "rounds": 3,
        "seconds": 480,
        "load_before": 0.1,
        "load_after": 2.0,
        "machine": {"processor": "2 cores"},
        "runs": {PRODUCT: runs(3000, 1500, 3300), POLLER: runs(2500, 1250, 2500, p50=50), JOBS: runs(300, 2000, 300)},
        "memory": {
            "events": 9,
            "seconds": 7,
            "early_mb": 90.0,
            "late_mb": 91.0,
            "peak_mb": 95.0,
            "posted": 9,
            "repeated": 0,
        },
    }


def test_ratio_is_to_the_best_peer_of_each_round_when_the_machine_slows_down() -> None:
    """3000/2500, 1500/2000, 3300/2500: the median of these."""
    line = outbox_report.summary(found())
    assert (line["drain_events_per_s"], line["ratio_to_best_peer"]) == (3000, 1.2)
    assert set(outbox_report.GOALS) < set(line)


def test_missed_goal_is_named_when_a_figure_is_worse() -> None:
    """Nobody has to compare numbers to see it."""
    worse = found()
    worse["runs"][PRODUCT] = runs(1000, 1000, 1000, p50=4.5)
    goals = {row[0]: row[3] for title, _, rows in outbox_report.tables(worse) if "Goals" in title for row in rows}
    assert (goals["ratio_to_best_peer"], goals["p50_ms"], goals["p99_ms"]) == ("MISSED", "MISSED", "met")


def test_page_can_be_read_when_it_is_written() -> None:
    """Each table is whole Markdown; how busy the machine was is said."""
    text = docs.outbox_section(found())
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert tables
    assert all(line.endswith("|") for line in tables)
    assert "load before the start 0.1, at the end 2.0" in text
