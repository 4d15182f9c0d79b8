"""What the bench concludes from its runs."""

from typing import Any
from xml.etree import ElementTree

from bench import docs, plot, report
from bench.mail import CASES


def runs(ours: float, theirs: float) -> dict[str, list[dict[str, Any]]]:
    """Two rounds of every case: ours at one rate, theirs at another; the machine is half as fast in the second."""
    return {
        case.name: [
            {"rate": rate / slow, "cpu": 0.2 if case.product else 0.8, "machine": 1.0, "peak_mb": 90.0, "details": {}}
            for slow in (1, 2)
            for rate in (ours if case.product else theirs,)
        ]
        for case in CASES
    }


def found() -> dict[str, Any]:
    """A whole run."""
    one = {"delay_ms": 0, "thrice": 0, "doubted": 80, "repeats_without_doubt": 0, "lost": 0}
    return {
        "made": "2026-12-01 02:00 UTC",
        "commit": "abc",
        "rounds": 2,
        "seconds": 600,
        "load_before": 0.1,
        "machine": {"processor": "2 cores"},
        "mail": runs(3000, 1200),
        "kill": [
            {"name": "in-doubt limit 1", "limit": 1, "repeats": [0, 1, 0, 0, 1], **one},
            {"name": "in-doubt limit 16", "limit": 16, "repeats": [9, 16, 0, 0, 1], **one},
            {"name": "FastStream", "limit": 16, "repeats": [40, 0, 0, 0, 0], **one},
        ],
        "split": {"split": [50, 60], "split_committed": [40, 50], "raw": [100, 100], "service_seconds": [0.2, 0.3]},
        "memory": {
            "backlog": 9,
            "mails": 8,
            "seconds": 7,
            "early_mb": 90.0,
            "late_mb": 91.0,
            "peak_mb": 95.0,
            "private_mb": 70.0,
        },
    }


def test_ratio_is_that_of_each_round_when_the_machine_slows_down_between_them() -> None:
    """A ratio of medians would compare a quick round of one with a slow round of the other."""
    line = report.summary(found())
    assert (line["ratio_to_faststream"], line["cpu_ratio_to_faststream"]) == (2.5, 0.25)


def test_last_line_has_every_figure_when_everything_was_measured() -> None:
    """Programs read it; the peer's own repeats are no figure of ours."""
    line = report.summary(found())
    wanted = {"recipients_per_s", "ratio_two_processes", "ratio_20ms_16", "ratio_20ms_64", *report.GOALS}
    assert wanted - {"max_repeats_per_kill_limit_4"} <= set(line)
    assert (line["max_repeats_per_kill_limit_1"], line["max_repeats_per_kill_limit_16"]) == (1, 16)
    assert (line["split_ratio_to_raw_publish"], line["mailer_growth_mb"]) == (0.55, 1.0)


def test_missed_goal_is_named_when_a_figure_is_worse() -> None:
    """Nobody has to compare numbers to see it."""
    goals = {row[0]: row[3] for title, _, rows in report.tables(found()) if title == "Goals" for row in rows}
    assert (goals["ratio_to_faststream"], goals["split_per_s"]) == ("met", "MISSED")


def test_page_and_plot_can_be_read_when_they_are_written() -> None:
    """Each table is whole Markdown, the plot whole XML."""
    tables = [line for line in docs.section(found()).splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)
    assert ElementTree.fromstring(plot.rates(runs(3000, 1200))).tag.endswith("svg")
