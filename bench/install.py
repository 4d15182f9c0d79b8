"""What the bench alone needs, fetched when it is missing: Postfix's test programs, the peer, the profiler.

Postfix is unpacked, not installed: no daemon is set up. The packages come from `peers.lock`, each with its hash, into
an environment of their own, so that nothing of a peer gets near the product's.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.places import LOCK, ROOT, WORK, say
from scripts.devservices import debian

PEERS = WORK / "peers"


@dataclass(frozen=True)
class Program:
    """A program and the environment that it needs."""

    path: str
    environment: dict[str, str] = field(default_factory=dict)


def everything() -> None:
    """All of it, and running services: nothing is fetched while something is measured."""
    WORK.mkdir(parents=True, exist_ok=True)
    services()
    smtp_sink()
    peers()


def services() -> None:
    """RabbitMQ and PostgreSQL, as `make up` starts them."""
    subprocess.run([ROOT / "scripts/services", "up"], check=True, stdout=sys.stderr)


def smtp_sink() -> Program:
    """Postfix's smtp-sink: the machine's own, or one unpacked from Debian's package."""
    return _postfix_program("smtp-sink")


def smtp_source() -> Program:
    """Postfix's smtp-source, which shows what the wire and the sink can do at most."""
    return _postfix_program("smtp-source")


def peers() -> Path:
    """The folder of programs of the environment with the peer and the profiler; made anew when the lock changed."""
    stamp, wanted = PEERS / "lock.sha256", sha256(LOCK.read_bytes() + sys.version.encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        say("bench: making the peers' environment")
        shutil.rmtree(PEERS, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(PEERS)])
        pip = [str(PEERS / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "--require-hashes", "-r", str(LOCK)])
        stamp.write_text(wanted)
    return PEERS / "bin"


def _postfix_program(name: str) -> Program:
    found = shutil.which(name) or shutil.which(f"/usr/sbin/{name}")
    if found:
        return Program(found)
    folder = WORK / "postfix"
    if not folder.exists():
        _unpack_postfix(folder)
    program = Program(str(folder / "usr/sbin" / name), {"LD_LIBRARY_PATH": str(folder / "usr/lib/postfix")})
    if "not found" in _output(["ldd", program.path], program.environment):
        debian.install("postfix")  # a library is missing that the package would bring along
        return Program(f"/usr/sbin/{name}")
    return program


def _unpack_postfix(folder: Path) -> None:
    say("bench: unpacking Debian's postfix for smtp-sink and smtp-source (it is not installed)")
    WORK.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=WORK) as temporary:
        download = ["apt-get", "download", "-qq", "postfix"]
        if subprocess.run(download, cwd=temporary, capture_output=True, check=False).returncode != 0:
            _run(["apt-get", "update", "-qq"])
            _run(download, temporary)
        [package] = Path(temporary).glob("postfix_*.deb")
        _run(["dpkg", "-x", str(package), str(folder)])


def _run(command: Sequence[str], folder: str | None = None) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"bench: {' '.join(command)} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")


def _output(command: Sequence[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False).stdout
