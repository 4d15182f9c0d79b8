"""The commands of scripts/services."""

import fcntl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from scripts.devservices import debian, docker
from scripts.devservices.broker import Broker
from scripts.devservices.places import BASE, die, say
from scripts.devservices.postgres import Postgres

HELP = """\
scripts/services up | down | status | install
scripts/services start-broker | stop-broker | restart-broker | kill-broker
scripts/services start-postgres | stop-postgres | restart-postgres | kill-postgres
scripts/services ctl ARGUMENTS...      rabbitmqctl against this broker
scripts/services php                   PHP and php-amqplib, for the tests that publish as the publisher does
scripts/services browser               Chromium, for the tests of the operators' page

up       start what does not run yet, wait until everything answers (may be repeated)
down     end what up started, and nothing else; the data stay
install  only fetch and prepare what up would start
kill-*   end at once, as a power cut would

Base folder: AFLUENTE_SERVICES (default /var/tmp/afluente). AFLUENTE_DOCKER=1 uses compose.yaml instead."""


class Service(Protocol):
    """What every service can do, wherever it runs."""

    name: str

    def install(self) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...
    def down(self) -> None: ...
    def running(self) -> bool: ...
    def answers(self) -> bool: ...
    def describe(self) -> list[str]: ...


def main(arguments: list[str]) -> int:
    """Do one command; returns the exit code."""
    command, *rest = arguments or ["help"]
    if command in ("help", "-h", "--help"):
        print(HELP)
        return 0
    broker: Broker | docker.Broker = docker.Broker() if docker.wanted() else Broker()
    services: list[Service] = [broker, docker.Postgres() if docker.wanted() else Postgres()]
    if command == "status":
        return _status(services)
    if command == "ctl":
        return broker.ctl(*rest)
    action = _actions(services).get(command)
    if action is None or rest:
        die(f"no command {' '.join(arguments)!r}\n{HELP}")
    with _one_at_a_time():
        action()
    return 0


def _actions(services: list[Service]) -> dict[str, Callable[[], None]]:
    actions: dict[str, Callable[[], None]] = {
        "install": partial(_each, services, "install"),
        "up": partial(_up, services),
        "down": partial(_each, services, "down"),
        "php": debian.php_with_amqplib,
        "browser": debian.chromium,
    }
    for service in services:
        actions[f"start-{service.name}"] = service.start
        actions[f"stop-{service.name}"] = service.stop
        actions[f"kill-{service.name}"] = service.kill
        actions[f"restart-{service.name}"] = partial(_restart, service)
    return actions


def _each(services: list[Service], what: str) -> None:
    for service in services:
        getattr(service, what)()


def _up(services: list[Service]) -> None:
    began = time.monotonic()
    for service in services:
        service.start()
    if time.monotonic() - began > 2:
        say(f"up after {time.monotonic() - began:.0f} s")


def _restart(service: Service) -> None:
    service.stop()
    service.start()


def _status(services: list[Service]) -> int:
    """Print one paragraph for each service; 0 when all answer."""
    answers = [service.running() and service.answers() for service in services]
    for service, well in zip(services, answers, strict=True):
        print(
            f"{service.name}: {'answers' if well else 'running, but does not answer' if service.running() else 'down'}"
        )
        for line in service.describe() if well else []:
            print(f"  {line}")
    return 0 if all(answers) else 1


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Several test runs may call `up` at once; the second waits and finds it done."""
    BASE.mkdir(parents=True, exist_ok=True)
    with (BASE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
