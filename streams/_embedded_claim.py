"""The claim of a process on an embedded log: one set of processors per file. A killed process loses it as well."""

import fcntl
import os
import sys
from pathlib import Path

from streams.errors import LogInUse


class Claim:
    """A lock of the kernel on a file beside the log. The file stays; what is written in it only serves the refusal."""

    def __init__(self, path: Path) -> None:
        self._log = path
        self._file = path.with_name(path.name + "-claim")
        self._descriptor: int | None = None

    def take(self) -> None:
        """Claim the log for this process, again if need be; LogInUse names the process that has it."""
        if self._descriptor is not None:
            return
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 1_000).decode(errors="replace")
            os.close(descriptor)
            raise LogInUse(
                f"Processors already run on {self._log}: {holder or 'another process'}. "
                "All processors of an embedded log run in one process; stop that one first."
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{_command()} (process {os.getpid()})".encode())
        self._descriptor = descriptor

    def give_up(self) -> None:
        """Let another process claim the log."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _command() -> str:
    """How this process was started, for people: `afluente run all`."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return " ".join([name or "python", *sys.argv[1:]])[:500]
