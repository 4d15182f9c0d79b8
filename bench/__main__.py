"""The command of the bench: `python -m bench`, also `make bench`. A whole run takes less than 15 minutes.

    python -m bench                          everything, then tables, a plot, and one line of JSON
    python -m bench --only kill split        some of it (mail, kill, split, memory)
    python -m bench --quick                  fewer and shorter rounds: a look, no result
    python -m bench --write-docs             put the newest whole run into docs/performance.md

It works on databases, streams and queues of its own, all on this machine, and removes them.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from bench import database, docs, install, kill, machine, mail, memory, plot, report, split
from bench.places import RESULTS, say

SCENARIOS = ("mail", "kill", "split", "memory")


async def measure(only: list[str], quick: bool, rounds: int) -> dict[str, Any]:
    """Run the scenarios one after another; nothing else of the bench runs meanwhile."""
    rounds = 1 if quick else rounds
    steps: dict[str, Callable[[], Awaitable[Any]]] = {
        "mail": lambda: mail.run(rounds, 2000 if quick else 10_000, 1000 if quick else 3000),
        "kill": lambda: _kills((1, 16) if quick else (1, 4, 16), (0,) if quick else (0, 20)),
        "split": lambda: split.run(3 if quick else 7),
        "memory": lambda: memory.run(20_000 if quick else 200_000, 15 if quick else 60),
    }
    found: dict[str, Any] = {"made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "commit": machine.commit()}
    found |= {"quick": quick, "rounds": rounds, "machine": machine.describe(), "load_before": machine.load()}
    begun = time.monotonic()
    async with database.template() as server:
        found["machine"]["postgresql"] = server
        for name in only:
            found[name] = await steps[name]()
    found["seconds"] = round(time.monotonic() - begun)
    return found


async def _kills(limits: tuple[int, ...], delays: tuple[float, ...]) -> list[dict[str, Any]]:
    return [asdict(one) for one in await kill.run(limits, delays)]


def main() -> None:
    """Read the arguments and do it."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), help="run these alone")
    parser.add_argument("--quick", action="store_true", help="a look in two minutes; its figures prove nothing")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the mail scenario (default 3)")
    parser.add_argument("--write-docs", action="store_true", help="write docs/performance.md from the newest whole run")
    arguments = parser.parse_args()
    if arguments.write_docs:
        docs.write()
        return
    install.everything()
    found = asyncio.run(measure(arguments.only, arguments.quick, arguments.rounds))
    _publish(found, whole=set(arguments.only) == set(SCENARIOS) and not arguments.quick)


def _publish(found: dict[str, Any], whole: bool) -> None:
    """Keep the figures and print them."""
    RESULTS.mkdir(exist_ok=True)
    name = f"{'whole' if whole else 'part'}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1))
    if "mail" in found:
        (RESULTS / f"{name}.svg").write_text(plot.rates(found["mail"]))
    report.show(found)
    say(f"bench: {found['seconds']} s; kept as {RESULTS / name}.*")
    print(json.dumps(report.summary(found)))


if __name__ == "__main__":
    main()
