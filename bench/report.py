"""From the runs to figures: medians with their range, ratios pair by pair, tables, and one line for programs."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

PAIRS = {
    "ratio_to_faststream": ("one process", "one process, FastStream"),
    "ratio_same_mail": ("one process", "one process, FastStream with our mail"),
    "ratio_two_processes": ("two processes", "two processes, FastStream"),
    "ratio_20ms_16": ("20 ms, 16 connections", "20 ms, 16 connections, FastStream"),
    "ratio_20ms_64": ("20 ms, 64 connections", "20 ms, 64 connections, FastStream"),
}
"""Ratios of rates: which case to which."""

GOALS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "ratio_to_faststream": ("at least 2.0", lambda x: x >= 2.0),
    "cpu_ratio_to_faststream": ("at most 0.4", lambda x: x <= 0.4),
    "ratio_two_processes": ("at least 2.0", lambda x: x >= 2.0),
    "ratio_20ms_16": ("at least 1.2", lambda x: x >= 1.2),
    "split_per_s": ("at least 50,000", lambda x: x >= 50_000),
    "split_ratio_to_raw_publish": ("at least 0.5", lambda x: x >= 0.5),
    "mailer_peak_mb": ("below 100", lambda x: x < 100),
    "mailer_growth_mb": ("flat: below 5", lambda x: x < 5),
    "lost_after_kills": ("0", lambda x: x == 0),
    "max_repeats_per_kill_limit_1": ("at most 1", lambda x: x <= 1),
    "max_repeats_per_kill_limit_4": ("at most 4", lambda x: x <= 4),
    "max_repeats_per_kill_limit_16": ("at most 16", lambda x: x <= 16),
}

Runs = Mapping[str, Sequence[Mapping[str, Any]]]


def ratios(runs: Runs, ours: str, theirs: str, figure: str = "rate") -> list[float]:
    """Ours to theirs, round by round."""
    return [a[figure] / b[figure] for a, b in zip(runs[ours], runs[theirs], strict=False)]


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """The last line: everything that has a goal, as far as it was measured."""
    line: dict[str, Any] = {}
    if "mail" in found:
        line |= _of_mail(found["mail"])
    if "split" in found:
        split, raw = found["split"]["split"], found["split"]["raw"]
        line["split_per_s"] = round(statistics.median(split))
        line["split_ratio_to_raw_publish"] = _median([a / b for a, b in zip(split, raw, strict=True)])
    if "memory" in found:
        line["mailer_peak_mb"] = round(found["memory"]["peak_mb"], 1)
        line["mailer_growth_mb"] = round(found["memory"]["late_mb"] - found["memory"]["early_mb"], 1)
    if "kill" in found:
        line |= _of_kills([one for one in found["kill"] if one["name"] != "FastStream"])
    return line


def _of_mail(runs: Runs) -> dict[str, Any]:
    line: dict[str, Any] = {"recipients_per_s": round(statistics.median(run["rate"] for run in runs["one process"]))}
    line |= {name: _median(ratios(runs, *pair)) for name, pair in PAIRS.items()}
    line["cpu_ratio_to_faststream"] = _median(ratios(runs, *PAIRS["ratio_to_faststream"], "cpu"))
    return line


def _of_kills(kills: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    line: dict[str, Any] = {"lost_after_kills": sum(one["lost"] for one in kills)}
    for limit in sorted({one["limit"] for one in kills}):
        line[f"max_repeats_per_kill_limit_{limit}"] = max(
            max(one["repeats"], default=0) for one in kills if one["limit"] == limit
        )
    return line


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)


# ---- tables: a title, a header, rows of text


def tables(found: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Everything that was measured, for the terminal and for the page."""
    made = []
    if "mail" in found:
        made.append(_mail_table(found["mail"]))
        made.append(_pair_table(found["mail"]))
    if "kill" in found:
        made.append(_kill_table(found["kill"]))
    if "split" in found:
        made.append(_split_table(found["split"]))
    if "memory" in found:
        made.append(_memory_table(found["memory"]))
    if goals := _goal_rows(summary(found)):
        made.append(("Goals", ["figure", "goal", "measured", ""], goals))
    return made


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """Median and range, as 1,234 (1,000-1,500)."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:{form}} ({low:{form}}-{high:{form}})"


def _mail_table(runs: Runs) -> tuple[str, list[str], list[list[str]]]:
    header = ["case", "mails/s", "CPU s/1,000", "machine s/1,000", "peak MB", "mails per commit", "commit ms"]
    rows = []
    for name, each in runs.items():
        details = [run["details"] for run in each if run["details"]]
        rows.append(
            [
                name,
                spread([run["rate"] for run in each]),
                spread([run["cpu"] for run in each], ".3f"),
                spread([run["machine"] for run in each], ".2f"),
                f"{max(run['peak_mb'] for run in each):.0f}",
                f"{statistics.median(d['mails_per_commit'] for d in details):.1f}" if details else "",
                f"{statistics.median(d['commit_ms'] for d in details):.1f}" if details else "",
            ]
        )
    return "Mails: median (range) of the rounds", header, rows


def _pair_table(runs: Runs) -> tuple[str, list[str], list[list[str]]]:
    rows = []
    for ours, theirs in PAIRS.values():
        rate, cpu, machine = (ratios(runs, ours, theirs, figure) for figure in ("rate", "cpu", "machine"))
        pairs = " ".join(f"{one:.2f}" for one in rate)
        rows.append([f"{ours} / {theirs}", spread(rate, ".2f"), pairs, spread(cpu, ".2f"), spread(machine, ".2f")])
    return "Mailer to FastStream, pair by pair", ["pair", "rate", "each round", "CPU", "machine"], rows


def _kill_table(kills: Sequence[Mapping[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    header = ["program", "server", "lost", "repeats of each kill", "more than twice", "rows marked as in doubt"]
    rows = [
        [
            one["name"],
            f"{one['delay_ms']:g} ms",
            str(one["lost"]),
            " ".join(map(str, one["repeats"])),
            str(one["thrice"]),
            "-" if one["name"] == "FastStream" else f"{one['doubted']}, all repeats among them" + _missing(one),
        ]
        for one in kills
    ]
    return "kill -9, five times in 2,000 mails", header, rows


def _missing(one: Mapping[str, Any]) -> str:
    return f" but {one['repeats_without_doubt']}" if one["repeats_without_doubt"] else ""


def _split_table(split: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    pairs = [a / b for a, b in zip(split["split"], split["raw"], strict=True)]
    rows = [
        ["splitter, from the first slice taken to the last confirm", spread(split["split"])],
        ["the same, to the commit that counts the last slice", spread(split["split_committed"])],
        ["rstream's send_batch of the same messages, ready-made", spread(split["raw"])],
        ["ratio, pair by pair", spread(pairs, ".2f")],
        ["the service, from the first slice published to the batch counted", _seconds(split["service_seconds"])],
    ]
    return "Split of 10,000 registrations into three partitions", ["what", "messages/s"], rows


def _seconds(values: Sequence[float]) -> str:
    return f"{spread(values, '.2f')} s"


def _memory_table(memory: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    rows = [
        ["resident after 10 s, median of a quarter of the time", f"{memory['early_mb']:.1f} MB"],
        ["resident at the end, likewise", f"{memory['late_mb']:.1f} MB"],
        ["the most (VmHWM)", f"{memory['peak_mb']:.1f} MB"],
        ["of it private at the end", f"{memory['private_mb']:.1f} MB"],
    ]
    title = f"Mailer on a backlog of {memory['backlog']:,}: {memory['mails']:,} mails in {memory['seconds']:.0f} s"
    return title, ["what", "memory"], rows


def _goal_rows(line: Mapping[str, Any]) -> list[list[str]]:
    return [
        [name, goal, f"{line[name]:,}", "met" if met(line[name]) else "MISSED"]
        for name, (goal, met) in GOALS.items()
        if name in line
    ]


def show(found: Mapping[str, Any]) -> None:
    """Print all tables."""
    console = Console(width=None if Console().is_terminal else 160)
    for title, header, rows in tables(found):
        table = Table(*header, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
