"""A real process: its probes, its signals, its exit codes."""

import http.client
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from streams.errors import BadSettings
from streams.exit_codes import ExitCode
from streams.process import ProcessHealth, serve_probes
from tests.house.tree import ROOT

CHILD = Path(__file__).with_name("process_child.py")
LIMIT = 30.0


class Child:
    """A process that runs one of the mains of process_child.py."""

    def __init__(self, main: str, grace_seconds: float = 20.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, CHILD, main, str(grace_seconds)],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def line(self) -> str:
        """The next line that the main writes."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a probe."""
        return get(self.port, path)

    def threads(self) -> int:
        """How many threads it has; probes that were answered are gone after a moment."""
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))

    def ended(self) -> ExitCode:
        """The code it ends with, waited for."""
        return ExitCode(self.process.wait(LIMIT))

    def log(self) -> str:
        """All that it logged, once it has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read()


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """Starts children; whatever is left of them is killed at the end."""
    children: list[Child] = []

    def started(main: str, grace_seconds: float = 20.0) -> Child:
        children.append(Child(main, grace_seconds))
        return children[-1]

    yield started
    for child in children:
        child.process.kill()
        child.process.communicate()


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and text of an HTTP answer on loopback."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def eventually(check: Callable[[], bool]) -> None:
    """Ask again until it is true, with a limit."""
    give_up = time.monotonic() + LIMIT
    while not check():
        assert time.monotonic() < give_up, "it never became true"
        time.sleep(0.05)


def heartbeat(child: Child) -> float:
    """The metric that moves while the loop turns."""
    found = re.search(r"^afluente_heartbeat_timestamp_seconds (\S+)$", child.get("/metrics")[1], re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_idle_process_stays_alive_and_its_heartbeat_moves(start: Callable[..., Child]) -> None:
    """Having nothing to do, also for longer than a loop may stand still, is no illness."""
    child = start("idles")
    eventually(lambda: heartbeat(child) > 0)
    first = heartbeat(child)
    eventually(lambda: heartbeat(child) > first + 2)
    assert child.get("/livez") == (200, "ok\n")
    assert child.get("/readyz") == (200, "ok\n")
    assert child.get("/elsewhere")[0] == 404


def test_liveness_fails_when_the_loop_hangs(start: Callable[..., Child]) -> None:
    """The probe answers although the loop does not, and says why; metrics still answer, too."""
    child = start("hangs")
    assert child.line() == "hanging"
    eventually(lambda: child.get("/livez")[0] == 503)
    assert "the event loop has not turned for" in child.get("/livez")[1]
    assert child.get("/metrics")[0] == 200


def test_sigterm_lets_work_in_flight_finish(start: Callable[..., Child]) -> None:
    """A clean stop is exit code 0, and the process is not ready meanwhile."""
    child = start("finishes")
    eventually(lambda: child.get("/readyz")[0] == 200 and heartbeat(child) > 0)
    child.process.send_signal(signal.SIGTERM)
    eventually(lambda: child.get("/readyz") == (503, "process: stopping\n"))
    assert child.ended() is ExitCode.OK
    assert child.line() == "finished"


def test_sigint_stops_as_sigterm_does(start: Callable[..., Child]) -> None:
    """Ctrl-C on a laptop is a clean stop."""
    child = start("idles")
    eventually(lambda: heartbeat(child) > 0)
    child.process.send_signal(signal.SIGINT)
    assert child.ended() is ExitCode.OK
    assert "Traceback" not in child.log()


def test_work_is_cancelled_when_the_grace_period_is_over(start: Callable[..., Child]) -> None:
    """It ends in order all the same, with a code of its own."""
    child = start("lingers", 0.5)
    assert child.line() == "lingering"
    child.process.send_signal(signal.SIGTERM)
    assert child.ended() is ExitCode.GRACE_OVER
    assert child.line() == "cancelled"


@pytest.mark.parametrize("main", ["lingers", "hangs"])
def test_second_signal_ends_the_process_at_once(start: Callable[..., Child], main: str) -> None:
    """Also when the loop hangs; a person at a keyboard need not look for kill -9."""
    child = start(main, 600.0)
    assert child.line() == ("hanging" if main == "hangs" else "lingering")
    before = child.threads()
    child.process.send_signal(signal.SIGTERM)
    # Two signals that arrive at once may become one, so wait until the first was handled: it starts a watching thread.
    eventually(lambda: child.threads() > before)
    child.process.send_signal(signal.SIGTERM)
    assert child.ended() is ExitCode.STOPPED_TWICE


def test_hanging_loop_does_not_outlive_the_grace_period(start: Callable[..., Child]) -> None:
    """Nothing of the loop can end it, so a thread does."""
    child = start("hangs", 0.1)
    assert child.line() == "hanging"
    child.process.send_signal(signal.SIGTERM)
    assert child.ended() is ExitCode.GRACE_OVER


@pytest.mark.parametrize(
    ("main", "code", "said"),
    [
        ("returns", ExitCode.OK, ""),
        ("crashes", ExitCode.FAILED, "process.crashed"),
        ("refused", ExitCode.LOG_REFUSED, "the broker refuses the password"),
    ],
)
def test_end_has_a_named_code_and_a_line(start: Callable[..., Child], main: str, code: ExitCode, said: str) -> None:
    """A known trouble is one sentence, a mistake in the code is a traceback."""
    child = start(main)
    assert child.ended() is code
    log = child.log()
    assert said in log
    assert ("Traceback" in log) == (main == "crashes")


# ---- probes without a process


def test_readiness_lists_every_check_that_fails_and_why() -> None:
    """False, a sentence and an exception each make it unready by name."""
    health = ProcessHealth()
    for name, check in (("database", lambda: True), ("log", lambda: "not connected"), ("other", lambda: False)):
        health.add_check(name, check)
    health.add_check("broken", lambda: bool(1 / 0))
    with serve_probes(health, CollectorRegistry()) as probes:
        status, text = get(probes.port, "/readyz?verbose")
    assert status == 503
    assert text.splitlines() == ["log: not connected", "other: not ready", "broken: ZeroDivisionError"]


def test_head_is_answered_without_a_body_and_post_is_refused() -> None:
    """Some probes ask with HEAD; nothing can be changed here."""
    with serve_probes(ProcessHealth(), CollectorRegistry()) as probes:
        assert get(probes.port, "/livez", "HEAD") == (200, "")
        assert get(probes.port, "/livez", "POST")[0] == 501


def test_port_in_use_is_refused_by_name() -> None:
    """The message names the settings to change."""
    with (
        serve_probes(ProcessHealth(), CollectorRegistry()) as probes,
        pytest.raises(BadSettings, match=r"PROBES_HOST, PROBES_PORT: cannot listen on 127\.0\.0\.1:\d+: .*in use"),
    ):
        serve_probes(ProcessHealth(), CollectorRegistry(), port=probes.port)
