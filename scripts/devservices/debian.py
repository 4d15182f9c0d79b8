"""Gets the programs: by apt where Debian's own release is new enough, else from a small Debian 13 in a folder.

The mirror and the proxy are the machine's own, asked of apt; no address is written here.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.devservices.places import BASE, die, say

TRIXIE = BASE / "trixie"
_POLICY = Path("/usr/sbin/policy-rc.d")


def broker_root() -> Path:
    """The root folder in which RabbitMQ 4 is installed: "/" or a Debian 13 of our own; installs what is missing."""
    if _major(_installed_version("rabbitmq-server")) >= 4:
        return Path("/")
    _need_root("RabbitMQ 4")
    if TRIXIE.exists():
        return TRIXIE
    _update()
    if _major(_candidate_version("rabbitmq-server")) >= 4:
        install("rabbitmq-server")
        return Path("/")
    _make_trixie()
    return TRIXIE


def postgres_programs() -> Path:
    """The folder of PostgreSQL's programs, release 15 or later; installs Debian's when there is none."""
    found = _find_postgres()
    if found is None:
        _need_root("PostgreSQL")
        _update()
        install("postgresql")
        found = _find_postgres()
    return found or die("Debian's package postgresql brought no release 15 or later in /usr/lib/postgresql")


def php_with_amqplib() -> None:
    """PHP and its AMQP library: what the publisher is written in. Installs Debian's when one is missing."""
    if shutil.which("php") and Path("/usr/share/php/PhpAmqpLib/autoload.php").exists():
        return
    _need_root("PHP with php-amqplib")
    _update()
    install("php-cli", "php-amqplib")


def chromium() -> None:
    """The browser of the tests in tests/browser, and a font for its pictures. Installs Debian's when there is none."""
    if shutil.which("chromium"):
        return
    _need_root("Chromium")
    _update()
    install("chromium", "fonts-liberation")


def install(*packages: str) -> None:
    """Install Debian packages without starting the services they bring along."""
    say(f"installing {' '.join(packages)}")
    with _services_stay_down():
        _apt("install", "-y", "-qq", "--no-install-recommends", *packages)


def _find_postgres() -> Path | None:
    found = [p for p in Path("/usr/lib/postgresql").glob("*/bin") if (p / "initdb").exists()]
    found = [p for p in found if int(p.parent.name) >= 15]
    return max(found, key=lambda p: int(p.parent.name), default=None)


def _make_trixie() -> None:
    """Unpack a minimal Debian 13 with its RabbitMQ into the base folder; it appears there only when complete."""
    mirror = _mirror()
    if not shutil.which("debootstrap"):
        install("debootstrap")
    say("unpacking a minimal Debian 13 with RabbitMQ 4 (once, one or two minutes)")
    unfinished, log = TRIXIE.with_suffix(".new"), BASE / "debootstrap.log"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    command = ["debootstrap", "--variant=minbase", "--include=rabbitmq-server", "trixie", str(unfinished), mirror]
    with log.open("wb") as output:
        done = subprocess.run(command, stdout=output, stderr=output, env=os.environ | _proxies(), check=False)
    if done.returncode != 0:
        die(f"debootstrap failed; see {log}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-10:]))
    for package in (unfinished / "var/cache/apt/archives").glob("*.deb"):
        package.unlink()
    unfinished.rename(TRIXIE)


def _mirror() -> str:
    """The Debian mirror that this machine's apt uses."""
    targets = _output("apt-get", "indextargets", "--format", "$(REPO_URI)", "Label: Debian").split()
    usable = [uri for uri in targets if uri.startswith(("http://", "https://", "file:"))]
    return usable[0] if usable else die("apt knows no Debian mirror by http, https or file; see sources.list(5)")


def _proxies() -> dict[str, str]:
    """The proxies that this machine's apt uses, as debootstrap's downloader wants them."""
    lines = _output("apt-config", "dump")
    found = re.findall(r'^Acquire::(https?)::Proxy "(http[^"]+)";', lines, re.MULTILINE | re.IGNORECASE)
    return {f"{scheme.lower()}_proxy": address for scheme, address in found}


def _update() -> None:
    # A stale index is good enough when the mirror is away for a moment, or when one foreign source is broken.
    done = subprocess.run(["apt-get", "update", "-qq"], stdout=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        say("apt-get update failed; going on with the package lists that are here")


def _apt(*arguments: str) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        ["apt-get", *arguments], env=environment, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode != 0:
        die(f"apt-get {' '.join(arguments)} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")


@contextmanager
def _services_stay_down() -> Iterator[None]:
    """Debian's packages start their service when installed, unless a policy says no; ours goes away again."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink(missing_ok=True)


def _need_root(what: str) -> None:
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        die(
            f"{what} is missing. Run this as root on Debian 12 or 13, or install it yourself (RabbitMQ 4 or "
            "later, PostgreSQL 15 or later), or use a Docker engine: AFLUENTE_DOCKER=1"
        )


def _installed_version(package: str) -> str:
    return _output("dpkg-query", "-W", "-f", "${Status} ${Version}", package).partition("install ok installed ")[2]


def _candidate_version(package: str) -> str:
    found = re.search(r"Candidate: (\S+)", _output("apt-cache", "policy", package))
    return found[1] if found else ""


def _major(version: str) -> int:
    """The first number of a Debian version such as 1:4.0.5-6; 0 for none."""
    found = re.match(r"(?:\d+:)?(\d+)", version)
    return int(found[1]) if found else 0


def _output(*command: str) -> str:
    """What a program prints; nothing when it is missing or fails."""
    if not shutil.which(command[0]):
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"}).stdout
