"""Where the bench keeps what it alone needs, and how it speaks to the person who waits."""

import socket
import sys
from pathlib import Path

from scripts.devservices import places

ROOT = Path(__file__).resolve().parents[1]
HOST = places.HOST
WORK = places.BASE / "bench"
"""Programs and environments that only the bench needs, and the logs of what it starts."""
RESULTS = ROOT / "bench" / "results"
LOCK = ROOT / "bench" / "peers.lock"
TEMPLATES = ROOT / "processors" / "mailer" / "mailables" / "import_registration"

LOG_URL = f"rabbitmq-stream://{places.USER}:{places.PASSWORD}@{HOST}:{places.STREAM_PORT}/"
AMQP_URL = f"amqp://{places.USER}:{places.PASSWORD}@{HOST}:{places.AMQP_PORT}/"
SERVER = f"{HOST}:{places.POSTGRES_PORT}"


def say(text: str) -> None:
    """Progress goes to stderr: the last line of stdout is the result."""
    print(text, file=sys.stderr, flush=True)


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
