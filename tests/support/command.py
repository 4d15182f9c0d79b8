"""The command `afluente` as people call it: a process of its own, its exit code and what it writes."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

PATIENCE = 60.0


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


async def afluente(environment: Mapping[str, str], *arguments: str, stdin: bytes = b"") -> Done:
    """Run it to its end."""
    async with started(environment, *arguments) as process:
        out, err = await asyncio.wait_for(process.communicate(stdin), PATIENCE)
        return Done(process.returncode or 0, out.decode(), err.decode())


@asynccontextmanager
async def started(environment: Mapping[str, str], *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start it; killed at the end of the block if it still runs."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "processors", *arguments),
        env={**kept, **environment},
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()  # to the end of its pipes, which the loop would close too late
