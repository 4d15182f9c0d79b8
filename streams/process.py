"""One process, such as a pod: run until told to stop, stop within a grace period, answer probes, end with a named code.

Not here: what is run (`main`), and what is ready (checks that others register).
"""

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType
from typing import Any, Self

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from streams.errors import BadSettings, StreamsError
from streams.exit_codes import ExitCode, exit_code
from streams.telemetry import Metrics, capture_crash, flush_reports

log = structlog.get_logger(__name__)

TICK_SECONDS = 0.5
STUCK_AFTER_SECONDS = 30.0
"""A loop that has not turned for so long does not come back: the pod is restarted. No turn holds it for a second."""

CANCEL_SECONDS = 5.0
"""How long work that was cancelled after the grace period may take to close its connections."""

Check = Callable[[], bool | str]
"""True: ready. False, or a sentence that says why not. Called in the thread of a probe: it only looks, quickly."""


class ProcessHealth:
    """What the probes tell: whether the loop turns, and whether everything that was registered is ready."""

    def __init__(self, stuck_after: float = STUCK_AFTER_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._stuck_after, self._clock = stuck_after, clock
        self._turned_at = clock()
        self._checks: dict[str, Check] = {}

    def turned(self) -> None:
        """The event loop has just turned."""
        self._turned_at = self._clock()

    def add_check(self, name: str, check: Check) -> None:
        """From now on the process is ready only when this is, too; the same name replaces the former check."""
        self._checks[name] = check

    def stuck(self) -> str | None:
        """Why the process is to be restarted, None if it is well. Having nothing to do is well."""
        silent = self._clock() - self._turned_at
        return f"the event loop has not turned for {silent:.0f} s" if silent > self._stuck_after else None

    def not_ready(self) -> dict[str, str]:
        """The checks that fail, and why."""
        answers = {name: _ask(check) for name, check in list(self._checks.items())}
        return {name: why for name, why in answers.items() if why is not None}


def _ask(check: Check) -> str | None:
    try:
        answer = check()
    except Exception as error:
        return type(error).__name__
    return None if answer is True else (answer or "not ready")


# ---- probes


class ProbeServer:
    """`/livez`, `/readyz` and `/metrics` on a thread of its own: it also answers, and truly, when the loop hangs."""

    def __init__(self, health: ProcessHealth, registry: CollectorRegistry, host: str, port: int) -> None:
        """Listen at once; port 0 takes a free one. Raises BadSettings when it cannot listen there."""
        handler = type("ProbeHandler", (_ProbeHandler,), {"health": health, "registry": registry})
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as error:
            raise BadSettings(f"PROBES_HOST, PROBES_PORT: cannot listen on {host}:{port}: {error.strerror}") from error
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="probes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; a probe under way is not waited for."""
        self._server.shutdown()
        self._server.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_probes(
    health: ProcessHealth, registry: CollectorRegistry, host: str = "127.0.0.1", port: int = 0
) -> ProbeServer:
    """Start answering probes; a context manager that stops at its end."""
    return ProbeServer(health, registry, host, port)


class _ProbeHandler(BaseHTTPRequestHandler):
    health: ProcessHealth
    registry: CollectorRegistry
    timeout = 5  # a client that connects and says nothing holds its thread no longer

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/livez":
                why = self.health.stuck()
                self._answer(why is None, why or "ok")
            case "/readyz":
                failing = self.health.not_ready()
                self._answer(not failing, "\n".join(f"{name}: {why}" for name, why in failing.items()) or "ok")
            case "/metrics":
                encode, content_type = choose_encoder(self.headers.get("Accept") or "")
                self._send(HTTPStatus.OK, encode(self.registry), content_type)
            case _:
                self._send(HTTPStatus.NOT_FOUND, b"not found\n")

    do_HEAD = do_GET  # noqa: N815 - the name is the base class's

    def _answer(self, well: bool, text: str) -> None:
        self._send(HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE, f"{text}\n".encode())

    def _send(self, status: HTTPStatus, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
        """Probes come every few seconds: they are no news."""


# ---- the run


def run_process(
    main: Callable[[asyncio.Event], Awaitable[None]],
    *,
    health: ProcessHealth | None = None,
    metrics: Metrics | None = None,
    grace_seconds: float = 25.0,
) -> ExitCode:
    """Run `main` until it returns, and answer with what code the process is to end.

    SIGTERM or SIGINT sets the event, once: main stops taking work, finishes what is in flight, and returns. What is not
    done after the grace period is cancelled. A second signal ends the process at once. Call it from the main thread.
    """
    health = health or ProcessHealth()
    with _Signals(grace_seconds) as signals, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            return runner.run(_supervise(main, signals, health, metrics, grace_seconds))
        except (Exception, BaseExceptionGroup) as error:
            return _crashed(error)
        finally:
            flush_reports()


async def _supervise(
    main: Callable[[asyncio.Event], Awaitable[None]],
    signals: "_Signals",
    health: ProcessHealth,
    metrics: Metrics | None,
    grace_seconds: float,
) -> ExitCode:
    stop = signals.stop_event()
    health.add_check("process", lambda: "stopping" if stop.is_set() else True)
    _tune_gc()
    work = asyncio.ensure_future(main(stop))
    with _task(_tick(health, metrics)), _task(stop.wait()) as stopping:
        first: set[asyncio.Future[Any]] = {work, stopping}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({work}, timeout=grace_seconds)
        if not work.done():
            return await _cut_short(work, grace_seconds)
        if work.cancelled():
            raise RuntimeError("main was cancelled by itself")
        await work
        return ExitCode.OK


async def _cut_short(work: "asyncio.Future[None]", grace_seconds: float) -> ExitCode:
    """The grace period is over. What was in flight is like after a kill: its leases pass, then it is looked at anew."""
    log.error("process.grace_over", grace_seconds=grace_seconds)
    work.cancel()
    await asyncio.wait({work}, timeout=CANCEL_SECONDS)
    if not work.done():
        _exit_now(ExitCode.GRACE_OVER)
    with suppress(asyncio.CancelledError, Exception):
        await work
    return ExitCode.GRACE_OVER


async def _tick(health: ProcessHealth, metrics: Metrics | None) -> None:
    """Tell that the loop turns, and how late it does; also when there is nothing to do at night."""
    while True:
        health.turned()
        due = time.monotonic() + TICK_SECONDS
        await asyncio.sleep(TICK_SECONDS)
        if metrics is not None:
            metrics.turned(time.monotonic() - due)


def _crashed(error: BaseException) -> ExitCode:
    code = exit_code(error)
    if code is ExitCode.FAILED:
        log.critical("process.crashed", exc_info=error)
        capture_crash(error)
    else:
        log.critical("process.ended", error=_sentences(error), exit_code=code.name)
    return code


def _sentences(error: BaseException) -> str:
    """Our own errors say in a sentence what is wrong; a traceback would only hide it."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(dict.fromkeys(_sentences(inner) for inner in error.exceptions))
    return str(error) if isinstance(error, StreamsError) and str(error) else type(error).__name__


def _tune_gc() -> None:
    """Keep full collections rare and short: each holds the loop, and so all slots, for as long as it takes.

    Everything imported so far lives as long as the process, so it is moved out of the collector's sight. What a turn
    makes is freed by its reference counts; a threshold of 700 would look for cycles many times per second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop  # noqa: PLC0415 - it does not exist for every platform
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


@contextmanager
def _task(work: Awaitable[object]) -> Iterator["asyncio.Future[object]"]:
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()


def _exit_now(code: ExitCode) -> None:
    flush_reports()
    os._exit(code)


class _Signals:
    """SIGTERM and SIGINT. Handled by Python itself and not by the loop, so that the second one works when it hangs."""

    def __init__(self, grace_seconds: float) -> None:
        self._limit = grace_seconds + 2 * CANCEL_SECONDS
        self._asked = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._former: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._former[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal itself had answered

    def stop_event(self) -> asyncio.Event:
        """The event of the running loop; already set when the signal came first."""
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        if self._asked:
            self._stop.set()
        return self._stop

    def _received(self, number: int, _frame: FrameType | None) -> None:
        if self._asked:
            os._exit(ExitCode.STOPPED_TWICE)
        self._asked = True
        self._watch()
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._begin_stop, self._stop, signal.Signals(number).name)

    def _begin_stop(self, stop: asyncio.Event, name: str) -> None:
        log.info("process.stopping", signal=name)
        stop.set()

    def _watch(self) -> None:
        """The last resort: a loop that hangs, or a thread that never ends, must not outlive the grace period."""
        watch = threading.Timer(self._limit, _exit_now, [ExitCode.GRACE_OVER])
        watch.daemon = True
        watch.start()
