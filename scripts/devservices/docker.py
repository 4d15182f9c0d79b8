"""The same services from compose.yaml, where a Docker engine answers and AFLUENTE_DOCKER=1 asks for it."""

import os
import shutil
import subprocess

from scripts.devservices import broker, postgres, tls
from scripts.devservices.places import BASE, die


def wanted() -> bool:
    """Whether the person asked for Docker; an engine that does not answer is then an error."""
    if os.environ.get("AFLUENTE_DOCKER") != "1":
        return False
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        die("AFLUENTE_DOCKER=1, but no Docker engine answers `docker info`")
    return True


class _Container:
    """One service of compose.yaml."""

    name: str

    def install(self) -> None:
        """Fetch the image."""
        _compose("pull", "--quiet", self.name)

    def start(self) -> None:
        """Start it and wait for its health check."""
        self.install()
        _compose("up", "--detach", "--wait", self.name)

    def stop(self) -> None:
        """End it in good order."""
        _compose("stop", self.name)

    def kill(self) -> None:
        """End it as a power cut would."""
        _compose("kill", self.name)

    def down(self) -> None:
        """End it and remove its container."""
        _compose("rm", "--stop", "--force", self.name)

    def running(self) -> bool:
        """Whether its container runs."""
        return bool(_compose("ps", "--status", "running", "--quiet", self.name).strip())

    def answers(self) -> bool:
        """Whether its health check is content."""
        return "healthy" in _compose("ps", "--format", "{{.Health}}", self.name).split()


class Broker(_Container):
    """RabbitMQ in a container."""

    name = "broker"

    def install(self) -> None:
        """Write the certificates and the configuration that compose.yaml mounts, and fetch the image."""
        tls.make_certificates()
        (BASE / "docker").mkdir(parents=True, exist_ok=True)
        # Inside a container 127.0.0.1 is the container itself; compose.yaml publishes the ports on 127.0.0.1 only.
        text = broker.configuration("/etc/rabbitmq/tls", listen="0.0.0.0")  # noqa: S104
        (BASE / "docker/rabbitmq.conf").write_text(text)
        (BASE / "docker/enabled_plugins").write_text(broker.enabled_plugins())
        super().install()

    def describe(self) -> list[str]:
        """Where to reach it."""
        return broker.describe()

    def ctl(self, *arguments: str) -> int:
        """Run rabbitmqctl in the container."""
        command = ["docker", "compose", "exec", "-T", self.name, "rabbitmqctl", *arguments]
        return subprocess.run(command, check=False).returncode


class Postgres(_Container):
    """PostgreSQL in a container."""

    name = "postgres"

    def describe(self) -> list[str]:
        """Where to reach it."""
        return postgres.describe()


def _compose(*arguments: str) -> str:
    done = subprocess.run(
        ["docker", "compose", *arguments], capture_output=True, text=True, check=False,
        env=os.environ | {"AFLUENTE_SERVICES": str(BASE)},
    )  # fmt: skip
    if done.returncode != 0:
        die(f"docker compose {' '.join(arguments)} failed:\n{done.stderr}")
    return done.stdout
