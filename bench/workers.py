"""The processes that are measured, and the mail servers they send to: started, looked at, ended by their pid."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bench import install, machine
from bench.places import AMQP_URL, HOST, LOG_URL, ROOT, TEMPLATES, WORK, free_port
from scripts.devservices.process import becomes_true, port_is_open

STOP_SECONDS = 15.0


class Worker:
    """A process of our own, in its own session. Its output goes to a file of its name in the bench's folder."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path = WORK) -> None:
        self.name = name
        with (WORK / f"{name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **environment},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def wait(self) -> None:
        """Until it has ended by itself. Raises SystemExit when it did not end well."""
        if self._process.wait() != 0:
            raise SystemExit(f"bench: {self.name} failed; see {WORK / self.name}.log")

    def kill(self) -> None:
        """kill -9 of the process and all that it started."""
        for member in machine.tree(self.pid):
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """SIGTERM, and after some time what no process survives."""
        if self.alive():
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        self.kill()


class Product(Worker):
    """`python -m processors run ...` with settings in its environment."""

    def __init__(self, processors: str, settings: Mapping[str, str]) -> None:
        self.port = free_port()
        fixed = {
            "LOG_URL": LOG_URL,
            "SMTP_HOST": HOST,
            "SMTP_SECURITY": "none",
            "MAIL_FROM": "nao-responda@example.com",
            "PROBES_PORT": str(self.port),
        }
        # Its own folder, so that no .env of somebody is read; the application is installed, so it is found.
        command = [sys.executable, "-m", "processors", "run", *processors.split()]
        super().__init__(f"product-{processors.replace(' ', '-')}", command, {**fixed, **settings})

    def metrics(self) -> dict[str, float]:
        """What `/metrics` says now, by name and labels; nothing while the process starts."""
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except OSError:  # refused, reset while it starts or stops, or answered with an error
            return {}
        return {name: float(value) for name, value in re.findall(r"^(\S+) (\S+)$", text, re.MULTILINE)}

    def mails(self) -> float:
        """How many mails it has recorded as sent."""
        return self.metrics().get('afluente_acts_total{outcome="sent",processor="mailer"}', 0.0)


def faststream(dsn: str, queue: str, smtp_port: int, *, workers: int, connections: int, same_mail: bool) -> Worker:
    """The peer, by its own command line."""
    programs = install.peers()
    environment = {
        "BENCH_DSN": dsn,
        "BENCH_QUEUE": queue,
        "BENCH_AMQP_URL": AMQP_URL,
        "BENCH_SMTP": f"{HOST}:{smtp_port}",
        "BENCH_CONNECTIONS": str(connections),
        "BENCH_TEMPLATES": str(TEMPLATES),
        "BENCH_MAIL": "same" if same_mail else "plain",
    }
    command = [str(programs / "faststream"), "run", "bench.peers.faststream_app:app"]
    more = ["--workers", str(workers)] if workers > 1 else []
    return Worker("faststream", [*command, *more], environment, folder=ROOT)


@contextmanager
def quick_sink() -> Iterator[int]:
    """Postfix's smtp-sink, which answers at once; yields its port."""
    program, port = install.smtp_sink(), free_port()
    user = ["-u", "nobody"] if os.geteuid() == 0 else []
    command = [program.path, *user, f"{HOST}:{port}", "1000"]
    with _serving(Worker("smtp-sink", command, program.environment), port):
        yield port


@contextmanager
def slow_sink(delay_ms: float, file: Path | None = None) -> Iterator[int]:
    """Our own sink with a delay, which notes each mail in `file`; yields its port."""
    port = free_port()
    arguments = [str(port), str(delay_ms), *([str(file)] if file else [])]
    with _serving(Worker("sink", [sys.executable, "-m", "bench.sink", *arguments], {}, folder=ROOT), port):
        yield port


@contextmanager
def _serving(worker: Worker, port: int) -> Iterator[None]:
    try:
        if not becomes_true(lambda: port_is_open(port), 10):
            raise SystemExit(f"bench: {worker.name} did not start; see {WORK / worker.name}.log")
        yield
    finally:
        worker.kill()


def wait_until_ready(products: Sequence[Product], seconds: float = 30) -> None:
    """Until all of them answer `/readyz` with yes."""
    end = time.monotonic() + seconds
    while not all(_ready(product) for product in products):
        if time.monotonic() > end or not all(product.alive() for product in products):
            raise SystemExit(f"bench: the product did not start; see {WORK}/product-*.log")
        time.sleep(0.05)


def _ready(product: Product) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{product.port}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:  # refused, reset while it starts or stops, or answered with an error
        return False
