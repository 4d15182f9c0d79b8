"""What several folders of tests share: the services, a database of one's own. A missing service fails, never skips."""

import subprocess
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest

from scripts.devservices import places

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Services:
    """The services of this machine and the switches that tests of faults need (each blocks, at most half a minute)."""

    host: str = places.HOST
    stream_port: int = places.STREAM_PORT
    stream_tls_port: int = places.STREAM_TLS_PORT
    amqp_port: int = places.AMQP_PORT
    management_port: int = places.MANAGEMENT_PORT
    user: str = places.USER
    password: str = places.PASSWORD
    ca_file: Path = places.TLS / "ca.pem"
    log_url: str = f"rabbitmq-stream://{places.USER}:{places.PASSWORD}@{places.HOST}:{places.STREAM_PORT}/"
    log_url_tls: str = f"rabbitmq-stream+tls://{places.USER}:{places.PASSWORD}@localhost:{places.STREAM_TLS_PORT}/"

    def do(self, *command: str) -> None:
        """Give one command to `scripts/services`, such as `restart-broker` or `kill-postgres`."""
        done = subprocess.run([ROOT / "scripts/services", *command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.fail(f"scripts/services {' '.join(command)}:\n{done.stdout}{done.stderr}", pytrace=False)


@pytest.fixture(scope="session")
def services() -> Services:
    """RabbitMQ and PostgreSQL, started if they do not run; they keep running after the tests."""
    running = Services()
    running.do("up")
    return running


@pytest.fixture(scope="session")
def broker(services: Services) -> Services:
    """The same, for tests that want to say that they need the broker only."""
    return services


@asynccontextmanager
async def fresh_database() -> AsyncIterator[str]:
    """A new, empty PostgreSQL database for the time of the block; yields its DATABASE_URL. Needs running services."""
    server = f"{places.HOST}:{places.POSTGRES_PORT}"
    name = f"test_{uuid.uuid4().hex}"
    connection = await asyncpg.connect(f"postgresql://postgres@{server}/postgres")
    try:
        await connection.execute(f"CREATE DATABASE {name}")
    finally:
        await connection.close()
    try:
        yield f"postgresql+asyncpg://postgres@{server}/{name}"
    finally:
        # Anew, because a test may have restarted the server meanwhile.
        connection = await asyncpg.connect(f"postgresql://postgres@{server}/postgres")
        try:
            await connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        finally:
            await connection.close()


@pytest.fixture
async def postgres_url(services: Services) -> AsyncIterator[str]:
    """DATABASE_URL of a new, empty PostgreSQL database, dropped after the test."""
    async with fresh_database() as url:
        yield url
