"""Where the services live and listen, and how this tool gives up. No code that starts anything."""

import os
from pathlib import Path
from typing import NoReturn

BASE = Path(os.environ.get("AFLUENTE_SERVICES", "/var/tmp/afluente")).absolute()  # noqa: S108 - a folder of its own
HOST = "127.0.0.1"

# Below 32768: above, any outgoing connection of the machine may hold a port while a test has its service stopped.
AMQP_PORT = 28672
STREAM_PORT = 28552
STREAM_TLS_PORT = 28551
MANAGEMENT_PORT = 28673
PROMETHEUS_PORT = 28692
DIST_PORT = 28711
EPMD_PORT = 28369
POSTGRES_PORT = 28432

USER = PASSWORD = "afluente"  # noqa: S105 - for a broker that only this machine reaches

TLS = BASE / "tls"


def die(sentence: str) -> NoReturn:
    """End with a sentence for the person at the keyboard."""
    raise SystemExit(f"services: {sentence}")


def say(sentence: str) -> None:
    """Tell what takes time or was done."""
    print(f"services: {sentence}", flush=True)
