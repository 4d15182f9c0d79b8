"""The page as a processor: listens until it is told to stop, then finishes what was asked."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import structlog
import uvicorn

from processors.admin.app import build
from processors.admin.office import Office
from streams.errors import BadSettings

log = structlog.get_logger(__name__)

STOP_SECONDS = 10
KEEP_ALIVE_SECONDS = 15
MOST_AT_ONCE = 100
BACKLOG = 128


class _Server(uvicorn.Server):
    """Signals are the process's (`streams/process.py`), not the server's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Admin:
    """Listens at once; raises BadSettings when it cannot."""

    def __init__(self, office: Office) -> None:
        settings = office.settings
        self._socket = _listen(settings.admin_host, settings.admin_port)
        self.port: int = self._socket.getsockname()[1]
        proxies = settings.admin_trusted_proxies
        self._server = _Server(
            uvicorn.Config(
                build(office),
                lifespan="off",
                http="h11",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=bool(proxies),
                forwarded_allow_ips=list(proxies),
                limit_concurrency=MOST_AT_ONCE,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=STOP_SECONDS,
            )
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`; requests under way are finished."""
        log.info("admin.listening", port=self.port)
        serving = asyncio.ensure_future(self._server.serve([self._socket]))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            self._server.should_exit = True
            await serving
        finally:
            stopping.cancel()
            with suppress(OSError):
                self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise BadSettings(f"ADMIN_HOST, ADMIN_PORT: cannot listen on {host}:{port}: {error.strerror}") from error
