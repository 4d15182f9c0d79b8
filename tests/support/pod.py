"""A process beside the test that runs processors as a pod does, `python -m processors run ...`, to be killed by it."""

import asyncio
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from streams.testing import eventually
from tests.support.job import PROCESSORS

START_SECONDS = 40.0
END_SECONDS = 30.0


class Pod:
    """Starts with the block and is killed at its end, if it still runs then. Its log must name nobody."""

    def __init__(self, folder: Path, environment: Mapping[str, str], *processors: str) -> None:
        """`processors`: all of the job, if none is named. `environment` are all settings; of the test's own it gets
        only what Python needs."""
        self._arguments = [sys.executable, "-m", "processors", "run", *(processors or PROCESSORS)]
        self._environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        self._environment |= environment
        self._folder = folder
        self._log = folder / f"pod-{uuid4().hex[:8]}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._port = 0

    async def __aenter__(self) -> Self:
        """Start it, and wait until its probe says that it is ready."""
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._arguments, env=self._environment, cwd=self._folder, stdout=log, stderr=log
            )
        try:
            await self.is_ready()
        except BaseException:
            await self.kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.kill()
        if error is None:
            assert "@example" not in self.log()

    # ---- looking

    def log(self) -> str:
        """All it has written."""
        return self._log.read_text("utf-8")

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log lines of one event."""
        lines = [line for line in self.log().splitlines() if line.startswith("{") and line.endswith("}")]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    async def logged(self, name: str) -> None:
        """Wait until it has logged this event."""

        def is_logged() -> None:
            self._check()
            assert self.events(name), self.log()[-2000:]

        await eventually(is_logged, END_SECONDS)

    async def is_ready(self) -> None:
        """Wait until it is ready for work."""

        async def probes_say_so() -> None:
            self._check()
            code, text = await self.probe("/readyz")
            assert code == 200, f"{text}\n{self.log()[-2000:]}"

        await eventually(probes_say_so, START_SECONDS)

    async def probe(self, path: str) -> tuple[int, str]:
        """The answer of its probe server; an AssertionError while there is none."""
        if not self._port:
            started = self.events("process.started")
            assert started, self.log()[-2000:]
            self._port = started[0]["probes_port"]
        return await asyncio.to_thread(_get, f"http://127.0.0.1:{self._port}{path}")

    def _check(self) -> None:
        if self._process is not None and self._process.returncode is not None:
            raise RuntimeError(f"the pod has ended with {self._process.returncode}:\n{self.log()[-4000:]}")

    # ---- ending

    async def terminate(self) -> None:
        """Tell it to stop, as a deploy does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    async def ended(self) -> int:
        """Wait for its end; the exit code, negative when a signal ended it."""
        assert self._process is not None
        return await asyncio.wait_for(self._process.wait(), END_SECONDS)

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self.ended()


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        raise AssertionError(f"no answer: {error}") from error
