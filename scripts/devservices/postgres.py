"""One PostgreSQL cluster of our own; databases in it are made by those who need them."""

import os
import pwd
import shutil
import subprocess
from functools import cached_property
from pathlib import Path

from scripts.devservices import debian
from scripts.devservices.places import BASE, HOST, POSTGRES_PORT, die
from scripts.devservices.process import Daemon, refuse_taken_ports, start_time

_SERVER = Daemon("postgresql", BASE / "postgres.pid", BASE / "postgres.out")
_DATA = BASE / "pg"


class Postgres:
    """The cluster's server."""

    name = "postgres"

    def install(self) -> None:
        """Get the programs and an initialised cluster into place."""
        if (_DATA / "PG_VERSION").exists():
            self._refuse_other_release()
            return
        initdb = self._command("initdb")  # first, because Debian's package also brings the user
        shutil.rmtree(_DATA, ignore_errors=True)
        _DATA.mkdir(parents=True)
        if os.geteuid() == 0:
            shutil.chown(_DATA, "postgres", "postgres")
        command = [*initdb, "-D", str(_DATA), "-U", "postgres", "-A", "trust", "-E", "UTF8"]
        done = subprocess.run(
            [*command, "--locale=C.UTF-8"], cwd="/", capture_output=True, text=True, env=_environment(), check=False
        )
        if done.returncode != 0:
            shutil.rmtree(_DATA, ignore_errors=True)
            die(f"initdb failed:\n{done.stderr}")

    def start(self) -> None:
        """Start the server unless it runs and wait until it answers."""
        if _SERVER.pid() is None:
            self.install()
            refuse_taken_ports("PostgreSQL", [POSTGRES_PORT])
            _forget_killed_server()
            options = {
                "port": POSTGRES_PORT,
                "listen_addresses": HOST,
                "max_connections": 200,
                "unix_socket_directories": "",
            }
            arguments = [part for key, value in options.items() for part in ("-c", f"{key}={value}")]
            _SERVER.start([*self._command("postgres"), "-D", str(_DATA), *arguments], _environment())
        _SERVER.wait_until(self.answers, seconds=60)

    def stop(self) -> None:
        """End the server; sessions that are still open are ended with it."""
        pid = _SERVER.pid()
        if pid is not None:
            # SIGTERM alone would wait for every client; pg_ctl's fast mode sends SIGINT.
            command = [*self._command("pg_ctl"), "stop", "-D", str(_DATA), "-m", "fast", "-t", "20"]
            subprocess.run(command, cwd="/", capture_output=True, env=_environment(), check=False)
        _SERVER.stop()

    def kill(self) -> None:
        """End the server as a power cut would."""
        _SERVER.kill()

    down = stop

    def running(self) -> bool:
        """Whether the server that this tool started lives."""
        return _SERVER.pid() is not None

    def answers(self) -> bool:
        """Whether it accepts sessions."""
        check = [
            str(self._programs / "pg_isready"),
            "-q",
            "-h",
            HOST,
            "-U",
            "postgres",
            "-p",
            str(POSTGRES_PORT),
            "-t",
            "2",
        ]
        return subprocess.run(check, env=_environment(), check=False).returncode == 0

    def describe(self) -> list[str]:
        """Where to reach it."""
        return describe()

    @cached_property
    def _programs(self) -> Path:
        return debian.postgres_programs()

    def _command(self, program: str) -> list[str]:
        # PostgreSQL refuses to run as root.
        path = str(self._programs / program)
        if os.geteuid() != 0:
            return [path]
        user = pwd.getpwnam("postgres")
        return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", path]

    def _refuse_other_release(self) -> None:
        made_by, here = (_DATA / "PG_VERSION").read_text().strip(), self._programs.parent.name
        if made_by != here:
            die(f"the cluster in {_DATA} was made by PostgreSQL {made_by}, here is {here}; delete that folder")


def _forget_killed_server() -> None:
    # PostgreSQL takes a zombie for a living server, and where no init reaps it, it stays one.
    lock = _DATA / "postmaster.pid"
    if lock.exists() and start_time(int(lock.read_text().split()[0])) is None:
        lock.unlink()


def describe() -> list[str]:
    """Where a cluster on this port is reached."""
    return [f"DATABASE_URL=postgresql+asyncpg://postgres@{HOST}:{POSTGRES_PORT}/postgres"]


def _environment() -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
