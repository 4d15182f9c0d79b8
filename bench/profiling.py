"""A flame graph of a processor at work on a backlog: `make profile P=mailer`, also `P=splitter`.

py-spy looks at the running process from outside, 200 times a second, so that what it shows is what runs in production:
whoever holds Python's lock at that moment, which leaves out threads that wait.
Needs the right to look into another process: root, or a kernel that allows it.
"""

import argparse
import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench import database, feeds, install, split, workers
from bench.database import Database
from bench.places import LOG_URL, RESULTS, say
from streams.log import StreamSpec
from streams.logs import open_log

RATE = 200


@asynccontextmanager
async def mailer(db: Database) -> AsyncIterator[workers.Product]:
    """A mailer with 60,000 recipients before it."""
    name = f"{db.name}-recipients"
    with workers.quick_sink() as port:
        async with feeds.stream(name, 1) as stream:
            await stream.publish(feeds.recipients(range(60_000), 1))
            settings = {"RECIPIENTS_STREAM": name, "RECIPIENTS_PARTITIONS": "1", "SMTP_PORT": str(port)}
            process = workers.Product("mailer", settings | {"DATABASE_URL": db.url})
            try:
                yield process
            finally:
                await asyncio.to_thread(process.stop)


@asynccontextmanager
async def splitter(db: Database) -> AsyncIterator[workers.Product]:
    """A splitter with half a million registrations before it."""
    log = open_log(LOG_URL, label="bench profile")
    await log.open()
    imports, recipients = f"{db.name}-imports", f"{db.name}-recipients"
    await log.declare(StreamSpec(imports))
    await log.declare(StreamSpec(recipients, split.PARTITIONS))
    for n in range(50):
        await split.publish_import(log, imports, split.import_body(n * split.ITEMS, split.ITEMS))
    settings = {"IMPORTS_STREAM": imports, "RECIPIENTS_STREAM": recipients, "DATABASE_URL": db.url}
    process = workers.Product("splitter", settings | {"RECIPIENTS_PARTITIONS": str(split.PARTITIONS)})
    try:
        yield process
    finally:
        await asyncio.to_thread(process.stop)
        await log.close()
        await feeds.delete(imports, 0)
        await feeds.delete(recipients, split.PARTITIONS)


PROCESSORS = {"mailer": mailer, "splitter": splitter}


async def profile(name: str, seconds: int, form: str) -> str:
    """Run it and look at it for so long; returns the file that was written."""
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"profile-{name}.{'svg' if form == 'flamegraph' else 'txt'}"
    async with database.template(), database.fresh(1) as db, PROCESSORS[name](db) as process:
        await asyncio.to_thread(workers.wait_until_ready, [process])
        await asyncio.sleep(1 if name == "splitter" else 3)
        options = ["--gil", "--rate", str(RATE), "--duration", str(seconds), "--format", form, "--output", str(target)]
        command = [str(install.peers() / "py-spy"), "record", *options, "--pid", str(process.pid)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"bench: py-spy failed:\n{done.stderr[-1000:]}")
    return str(target)


def main() -> None:
    """Read the arguments and do it."""
    parser = argparse.ArgumentParser(prog="python -m bench.profiling", description=__doc__.splitlines()[0])
    parser.add_argument("processor", choices=PROCESSORS)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--format", choices=("flamegraph", "raw"), default="flamegraph")
    arguments = parser.parse_args()
    install.everything()
    say(f"bench: wrote {asyncio.run(profile(arguments.processor, arguments.seconds, arguments.format))}")


if __name__ == "__main__":
    main()
