"""Processes that outlive this command: started detached, known again by pid and start time, ended by that pid only."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from scripts.devservices.places import HOST, die


@dataclass(frozen=True)
class Daemon:
    """One long-lived process; `pid_file` remembers it, `log_file` keeps what it printed."""

    name: str
    pid_file: Path
    log_file: Path

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it as the leader of its own session, so that a closing terminal does not end it."""
        self.pid_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            child = subprocess.Popen(
                command, env=environment, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.pid_file.write_text(f"{child.pid} {start_time(child.pid)}\n")

    def pid(self) -> int | None:
        """The pid, if the very process that was started still runs (a pid alone may belong to a stranger by now)."""
        try:
            pid, started = self.pid_file.read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        return int(pid) if start_time(int(pid)) == started else None

    def stop(self, seconds: float = 25) -> None:
        """Ask it to end; after the time given, kill it."""
        pid = self.pid()
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
            if not becomes_true(lambda: self.pid() is None, seconds):
                self.kill()
        self.pid_file.unlink(missing_ok=True)

    def kill(self) -> None:
        """End it and all that it started at once, as a power cut would."""
        pid = self.pid()
        if pid is not None:
            family = [pid, *_descendants(pid)]
            for member in family:
                with suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            if not becomes_true(lambda: not any(map(start_time, family)), 10):
                die(f"{self.name} (pid {pid}) does not die")
        self.pid_file.unlink(missing_ok=True)

    def tail(self, lines: int = 15) -> str:
        """The last lines it printed."""
        if not self.log_file.exists():
            return ""
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])

    def wait_until(self, answers: Callable[[], bool], seconds: float) -> None:
        """Wait until it answers; a process that ended instead is reported with its last words."""
        if becomes_true(lambda: answers() or self.pid() is None, seconds) and self.pid() is not None:
            return
        die(f"{self.name} did not come up; see {self.log_file}:\n{self.tail()}")


def becomes_true(condition: Callable[[], bool], seconds: float) -> bool:
    """Ask five times a second, at most so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def port_is_open(port: int) -> bool:
    """Whether anything listens there."""
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex((HOST, port)) == 0


def refuse_taken_ports(name: str, ports: Sequence[int]) -> None:
    """Give up when a port that is needed belongs to a process that this tool did not start."""
    taken = [str(port) for port in ports if port_is_open(port)]
    if taken:
        die(
            f"{name} needs port {', '.join(taken)} of {HOST}, which another process has (ss -ltnp shows it); "
            "end that one, or the services of another base folder with `scripts/services down`"
        )


def start_time(pid: int) -> str | None:
    """Clock ticks since boot at which the process started; None when it is gone or a zombie."""
    state, fields = _stat(pid)
    return None if state in "ZX" else fields[18]


def _descendants(pid: int) -> list[int]:
    """Children, their children and so on; some leave the session of their parent, so that a group would miss them."""
    parents = {int(entry.name): int(_stat(int(entry.name))[1][0]) for entry in Path("/proc").glob("[0-9]*")}
    children = [child for child, parent in parents.items() if parent == pid]
    return children + [descendant for child in children for descendant in _descendants(child)]


def _stat(pid: int) -> tuple[str, list[str]]:
    """State and further fields of proc_pid_stat(5), from the parent's pid on; state X for a process that is gone."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", ["0"] * 19
    return state, fields
