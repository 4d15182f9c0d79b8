"""Where the import job runs in a test: a migrated database and fresh streams, embedded or on real services.

`Site` says it in the words of the environment, for a process of its own (`pod.py`) or for one in the test (`job.py`).
Here too: the fixtures that hand sites out; a folder's conftest.py imports those that it wants.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from uuid import uuid4

import pytest

from processors._demo.sink import Sink
from tests.conftest import Services
from tests.support.broker import Management
from tests.support.databases import Migrated

Kind = Literal["embedded", "services"]

SHORT_TIMES = {
    "ACT_TIMEOUT_SECONDS": "3",
    "COMMIT_ALLOWANCE_SECONDS": "1",
    "CLOCK_STEP_SECONDS": "1",
    "BACKOFF_SECONDS": "0.3,0.6",
    "RELAY_POLL_SECONDS": "0.1",
    "IDLE_LOOK_SECONDS": "0.3",
    "QUEUED_VISIBILITY_SECONDS": "2",
    "BREAKER_PROBE_SECONDS": "0.2",
    "BREAKER_PROBE_MAX_SECONDS": "0.4",
    "SMTP_CONNECT_TIMEOUT_SECONDS": "2",
}
"""Production's relations, in seconds that a test can wait for; a claim lasts 5 s."""


@dataclass(frozen=True)
class Site:
    """A database, a log, and names of streams that nobody else has."""

    kind: Kind
    database_url: str
    log_url: str
    folder: Path
    name: str

    def environment(self, sink: Sink, **changes: object) -> dict[str, str]:
        """All settings; `changes` in capitals win, and None leaves a variable out."""
        values: dict[str, object] = {
            "DATABASE_URL": self.database_url,
            "LOG_URL": self.log_url,
            "IMPORTS_STREAM": f"{self.name}-imports",
            "RECIPIENTS_STREAM": f"{self.name}-recipients",
            "OUTBOX_STREAM": f"{self.name}-outbox",
            "OUTBOX_PARTITIONS": 1,
            "REPAYMENT_REQUESTS_STREAM": f"{self.name}-repayment-requests",
            "DEAD_LETTERS_STREAM": f"{self.name}-dead-letters",
            **SHORT_TIMES,
            "SMTP_HOST": sink.host,
            "SMTP_PORT": sink.port,
            "SMTP_SECURITY": "none",
            "MAIL_FROM": "cultura@example.org",
            "PROBES_PORT": 0,
            "LOG_FORMAT": "json",
        }
        return {name: str(value) for name, value in {**values, **changes}.items() if value is not None}


@contextmanager
def _new_site(kind: Kind, migrated: Migrated, folder: Path, services: Services | None) -> Iterator[Site]:
    with migrated.copy("sqlite" if services is None else "postgresql", folder) as database_url:
        log_url = f"embedded:///{folder / 'log.db'}" if services is None else services.log_url
        site = Site(kind, database_url, log_url, folder, f"job-{uuid4().hex[:12]}")
        yield site
        if services is not None:
            management = Management(services)
            for stream in ("imports", "recipients", "outbox", "repayment-requests", "dead-letters"):
                asyncio.run(management.delete(f"{site.name}-{stream}"))


# ---- fixtures


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Migrated]:
    """Migrated databases to copy."""
    databases = Migrated(tmp_path_factory.mktemp("migrated"))
    yield databases
    databases.drop()


@pytest.fixture
def embedded_site(migrated: Migrated, tmp_path: Path) -> Iterator[Site]:
    """Embedded log and SQLite: one machine, one process."""
    with _new_site("embedded", migrated, tmp_path, None) as site:
        yield site


@pytest.fixture
def services_site(migrated: Migrated, tmp_path: Path, services: Services) -> Iterator[Site]:
    """RabbitMQ and PostgreSQL, as in production."""
    with _new_site("services", migrated, tmp_path, services) as site:
        yield site


@pytest.fixture(params=["embedded", "services"])
def site(request: pytest.FixtureRequest) -> Site:
    """Each of the two."""
    found: Site = request.getfixturevalue(f"{request.param}_site")
    return found


@pytest.fixture
async def sink() -> AsyncIterator[Sink]:
    """A mail server that keeps what it gets."""
    sink = Sink()
    await sink.start()
    yield sink
    await sink.stop()
