"""One RabbitMQ 4 node of our own, with streams, their TLS listener, management and Prometheus.

It runs as the package's user `rabbitmq`, in the root folder that debian.py found. Where that is a Debian 13 in a
folder, the node sees /proc and /dev through a mount namespace of its own, so that nothing stays mounted after it; a
container that may not mount has the devices that debootstrap made.
"""

import base64
import os
import shutil
import socket
import struct
import subprocess
import urllib.error
import urllib.request
from functools import cached_property
from pathlib import Path

from scripts.devservices import debian, tls
from scripts.devservices.places import (
    AMQP_PORT,
    BASE,
    DIST_PORT,
    EPMD_PORT,
    HOST,
    MANAGEMENT_PORT,
    PASSWORD,
    PROMETHEUS_PORT,
    STREAM_PORT,
    STREAM_TLS_PORT,
    TLS,
    USER,
)
from scripts.devservices.process import Daemon, port_is_open, refuse_taken_ports

PORTS = (AMQP_PORT, STREAM_PORT, STREAM_TLS_PORT, MANAGEMENT_PORT, PROMETHEUS_PORT, DIST_PORT)
PLUGINS = ("rabbitmq_management", "rabbitmq_prometheus", "rabbitmq_stream", "rabbitmq_stream_management")

_NODE = Daemon("rabbitmq", BASE / "rabbitmq.pid", BASE / "rabbitmq.out")
_EPMD = Daemon("epmd", BASE / "epmd.pid", BASE / "epmd.out")

_ENTER = 'mount -t proc proc "$0/proc"; mount --rbind /dev "$0/dev"; exec chroot --userspec=rabbitmq "$0" "$@"'


class Broker:
    """The node and its epmd."""

    name = "broker"

    def install(self) -> None:
        """Get the programs, certificates and configuration into place."""
        tls.make_certificates()
        home = self._home
        home.mkdir(parents=True, exist_ok=True)
        for name in ("ca.pem", "server.pem", "server.key"):
            shutil.copyfile(TLS / name, home / name)
        (home / "rabbitmq.conf").write_text(configuration(self._inside(home)))
        (home / "enabled_plugins").write_text(enabled_plugins())
        (home / "no-env.conf").write_text(
            "# stands in for /etc/rabbitmq/rabbitmq-env.conf, which belongs to another node\n"
        )
        if os.geteuid() == 0:
            subprocess.run(["chroot", str(self._root), "chown", "-R", "rabbitmq:", self._inside(home)], check=True)

    def start(self) -> None:
        """Start what does not run yet and wait until every listener answers."""
        if _NODE.pid() is None:
            self.install()
            self._start_epmd()
            refuse_taken_ports("RabbitMQ", PORTS)
            _NODE.start(self._command("/usr/lib/rabbitmq/bin/rabbitmq-server"), self._environment())
        _NODE.wait_until(self.answers, seconds=90)

    def stop(self) -> None:
        """End the node in good order."""
        _NODE.stop()

    def kill(self) -> None:
        """End the node as a power cut would."""
        _NODE.kill()

    def down(self) -> None:
        """End the node and its epmd."""
        self.stop()
        _EPMD.stop()

    def running(self) -> bool:
        """Whether the node that this tool started lives."""
        return _NODE.pid() is not None

    def answers(self) -> bool:
        """Whether streams (plain and TLS), AMQP, management and Prometheus really answer."""
        listening = all(port_is_open(port) for port in (AMQP_PORT, STREAM_TLS_PORT, PROMETHEUS_PORT))
        return listening and _stream_answers() and _management_answers()

    def ctl(self, *arguments: str) -> int:
        """Run rabbitmqctl against the node."""
        command = self._command("/usr/lib/rabbitmq/bin/rabbitmqctl")
        return subprocess.run([*command, *arguments], env=self._environment(), check=False).returncode

    def describe(self) -> list[str]:
        """Where to reach it."""
        return describe()

    @cached_property
    def _root(self) -> Path:
        return debian.broker_root()

    @property
    def _home(self) -> Path:
        return BASE / "rabbitmq" if self._root == Path("/") else self._root / "srv/rabbitmq"

    def _inside(self, path: Path) -> str:
        """The path as the node sees it."""
        return "/" + str(path.relative_to(self._root))

    def _start_epmd(self) -> None:
        # Of our own, because an epmd that the node starts is nobody's child and could not be ended by its pid.
        if _EPMD.pid() is None:
            refuse_taken_ports("epmd", [EPMD_PORT])
            _EPMD.start(self._command("/usr/bin/epmd"), self._environment())
            _EPMD.wait_until(lambda: port_is_open(EPMD_PORT), seconds=10)

    def _command(self, program: str) -> list[str]:
        if os.geteuid() != 0:
            return [program]
        if self._root == Path("/"):
            return ["chroot", "--userspec=rabbitmq", "/", program]
        if _may_mount():
            return ["unshare", "--mount", "sh", "-c", _ENTER, str(self._root), program]
        return ["chroot", "--userspec=rabbitmq", str(self._root), program]

    def _environment(self) -> dict[str, str]:
        home = self._inside(self._home)
        return {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "HOME": home,
            "ERL_EPMD_PORT": str(EPMD_PORT),
            "ERL_EPMD_ADDRESS": HOST,
            "RABBITMQ_CONF_ENV_FILE": f"{home}/no-env.conf",
            "RABBITMQ_CONFIG_FILE": f"{home}/rabbitmq.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{home}/enabled_plugins",
            "RABBITMQ_NODENAME": "afluente@localhost",
            "RABBITMQ_DIST_PORT": str(DIST_PORT),
            "RABBITMQ_MNESIA_BASE": f"{home}/data",
            "RABBITMQ_LOG_BASE": f"{home}/log",
            "RABBITMQ_PID_FILE": f"{home}/node.pid",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }


def describe() -> list[str]:
    """Where a broker of this configuration is reached."""
    return [
        f"LOG_URL=rabbitmq-stream://{USER}:{PASSWORD}@{HOST}:{STREAM_PORT}/",
        f"LOG_URL=rabbitmq-stream+tls://{USER}:{PASSWORD}@localhost:{STREAM_TLS_PORT}/   (CA: {TLS / 'ca.pem'})",
        f"management on port {MANAGEMENT_PORT}, Prometheus on port {PROMETHEUS_PORT}, AMQP on port {AMQP_PORT}",
    ]


def configuration(certificates: str, listen: str = HOST) -> str:
    """The text of rabbitmq.conf; `certificates` is their folder as the node sees it.

    Memory is asked of Erlang and has a fixed limit, because a node that may not mount has no /proc to read it from.
    """
    return f"""\
listeners.tcp.1 = {listen}:{AMQP_PORT}
stream.listeners.tcp.1 = {listen}:{STREAM_PORT}
stream.listeners.ssl.1 = {listen}:{STREAM_TLS_PORT}
stream.advertised_host = {HOST}
stream.advertised_port = {STREAM_PORT}
stream.advertised_tls_host = {HOST}
stream.advertised_tls_port = {STREAM_TLS_PORT}
ssl_options.cacertfile = {certificates}/ca.pem
ssl_options.certfile = {certificates}/server.pem
ssl_options.keyfile = {certificates}/server.key
ssl_options.verify = verify_none
management.tcp.ip = {listen}
management.tcp.port = {MANAGEMENT_PORT}
prometheus.tcp.ip = {listen}
prometheus.tcp.port = {PROMETHEUS_PORT}
default_user = {USER}
default_pass = {PASSWORD}
default_user_tags.administrator = true
disk_free_limit.absolute = 200MB
vm_memory_calculation_strategy = allocated
vm_memory_high_watermark.absolute = 1GB
log.file.level = info
"""


def enabled_plugins() -> str:
    """The text of enabled_plugins, an Erlang term."""
    return f"[{','.join(PLUGINS)}].\n"


def _may_mount() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


def _stream_answers() -> bool:
    """Exchange one PeerProperties frame (key 17, version 1) of the stream protocol."""
    body = struct.pack(">HHII", 17, 1, 1, 0)
    try:
        with socket.create_connection((HOST, STREAM_PORT), timeout=2) as connection:
            connection.sendall(struct.pack(">I", len(body)) + body)
            return connection.recv(6)[4:] == struct.pack(">H", 0x8011)
    except OSError:
        return False


def _management_answers() -> bool:
    secret = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    address = f"http://{HOST}:{MANAGEMENT_PORT}/api/health/checks/local-alarms"
    request = urllib.request.Request(address, headers={"Authorization": f"Basic {secret}"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=3) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
