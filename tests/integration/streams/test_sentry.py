"""What really arrives at Sentry: envelopes stored by a local stand-in for its intake."""

import gzip
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import pytest
import sentry_sdk
import structlog

from streams.errors import Reject, Retry
from streams.telemetry import capture_crash, capture_final_failure, flush_reports, init_sentry

ADDRESS, NAME, PASSWORD, TOKEN = "ana.secret@example.com", "Ana Secret", "hunter2-of-smtp", "tok-1234567890"
SECRETS = (ADDRESS, "ana.secret", NAME, "Ana", PASSWORD, TOKEN)
KEY = "5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"


class Intake:
    """The endpoint that an SDK posts to. It answers 200 and keeps the bodies as text."""

    def __init__(self) -> None:
        self.envelopes: list[str] = []
        handler = type("IntakeHandler", (_IntakeHandler,), {"envelopes": self.envelopes})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.dsn = f"http://publickey@127.0.0.1:{self._server.server_address[1]}/42"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def events(self) -> list[dict[str, Any]]:
        """All events that have arrived, after the SDK has sent what it had."""
        flush_reports()
        items = [line for envelope in self.envelopes for line in envelope.splitlines()[1:]]
        kinds = [json.loads(line) for line in items[::2]]
        assert {kind["type"] for kind in kinds} <= {"event"}
        return [json.loads(line) for line in items[1::2]]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _IntakeHandler(BaseHTTPRequestHandler):
    envelopes: list[str]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.envelopes.append((gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body).decode())
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
        """Nothing."""


@pytest.fixture
def intake() -> Iterator[Intake]:
    """A stand-in that the SDK reports to, set up as a process does it."""
    with Intake() as server:
        init_sentry(server.dsn, "test", "afluente@0.1.0")
        yield server
        sentry_sdk.init()


def fail(error: Exception) -> Exception:
    """The error as it is after a raise out of frames that hold everything personal and secret, caused by another."""
    recipient, name, password, header = ADDRESS, NAME, PASSWORD, f"Bearer {TOKEN}"
    try:
        try:
            raise KeyError(f"{name} <{recipient}> {password} {header}")  # noqa: TRY301 - a cause with its own frames
        except KeyError as cause:
            raise error from cause
    except Exception as raised:
        raised.add_note(f"while sending to {recipient}")
        return raised


def report(error: Exception, row_id: int = 4711) -> None:
    """The final failure of a row."""
    capture_final_failure(error, processor="mailer", key=KEY, row_id=row_id)


@pytest.mark.parametrize(
    "error",
    [
        Retry(f"550 5.1.1 <{ADDRESS}>: {NAME} has no mailbox here; password={PASSWORD}", fault=None),
        Retry(f"535 5.7.8 {NAME}", fault="auth"),
        Reject("rejected", f"the address {ADDRESS} is refused; Authorization: Bearer {TOKEN}"),
        ValueError(f"{NAME} <{ADDRESS}>"),
    ],
)
def test_no_personal_data_and_no_secret_leave_when_a_row_has_failed(intake: Intake, error: Exception) -> None:
    """Frames, breadcrumbs, spans, log lines, request, user, extra, message: none of it; key and row id: yes."""
    with sentry_sdk.isolation_scope() as scope:
        scope.set_user({"email": ADDRESS, "username": NAME})
        scope.set_extra("body", f"{NAME} {ADDRESS}")
        scope.set_context("mail", {"to": ADDRESS, "name": NAME})
        scope.set_tag("recipient", ADDRESS)
        sentry_sdk.add_breadcrumb(message=f"sending to {ADDRESS}", data={"name": NAME})
        logging.getLogger("streams.x").error("could not send to %s, %s", ADDRESS, NAME)
        structlog.get_logger("streams.x").error("could not send", to=ADDRESS, name=NAME)
        with sentry_sdk.start_transaction(name=ADDRESS), sentry_sdk.start_span(name=f"smtp {ADDRESS}"):
            report(fail(error))
    (event,) = intake.events()
    assert [secret for secret in SECRETS if any(secret in envelope for envelope in intake.envelopes)] == []
    assert event["tags"]["key"] == KEY
    assert event["tags"]["row_id"] == "4711"
    assert event["tags"]["processor"] == "mailer"


def test_report_says_where_and_with_what_code_it_failed(intake: Intake) -> None:
    """What is left is enough to find the place in the code and the kind of refusal."""
    report(fail(Retry(f"550 5.1.1 <{ADDRESS}>: unknown")))
    (event,) = intake.events()
    last = event["exception"]["values"][-1]
    assert last["type"] == "Retry"
    assert last["value"].startswith("550 5.1.1 (text withheld")
    frame = last["stacktrace"]["frames"][-1]
    assert frame["function"] == "fail"
    assert frame["lineno"] > 0
    assert (event["environment"], event["release"]) == ("test", "afluente@0.1.0")


def test_each_row_is_reported_once_and_alike_ones_are_one_issue(intake: Intake) -> None:
    """Also when rows share the very error, as in an outage; and a log line about it is no second report."""
    error = Retry("connection refused", fault="connect")
    for row_id in (1, 2, 3):
        logging.getLogger("streams.runtime").error("row.failed", exc_info=error)
        report(error, row_id)
    events = intake.events()
    assert sorted(event["tags"]["row_id"] for event in events) == ["1", "2", "3"]
    assert {tuple(event["fingerprint"]) for event in events} == {("mailer", "Retry", "connect")}


def test_nothing_is_sent_for_a_group_of_rows_that_only_log(intake: Intake) -> None:
    """Sentry hears of final failures and crashes, not of log lines, whatever their level."""
    logging.getLogger("any").critical("odd")
    structlog.get_logger("any").error("odd")
    assert intake.events() == []


def test_crash_of_a_process_is_reported_without_its_text(intake: Intake) -> None:
    """A mistake in the code may quote anybody's data."""
    capture_crash(fail(KeyError(NAME)))
    (event,) = intake.events()
    assert event["exception"]["values"][-1]["type"] == "KeyError"
    assert [secret for secret in SECRETS if any(secret in envelope for envelope in intake.envelopes)] == []


def test_report_never_raises_when_the_intake_is_away() -> None:
    """Telling about a failure must not become one, nor hold up the end of a process."""
    init_sentry("http://publickey@127.0.0.1:9/42", "test", "afluente@0.1.0")
    try:
        report(fail(Reject("rejected", "no")))
        flush_reports()
    finally:
        sentry_sdk.init()


def test_nothing_happens_without_a_dsn() -> None:
    """Reporting is optional."""
    init_sentry(None, "test", "afluente@0.1.0")
    report(fail(Reject("rejected", "no")))
    assert sentry_sdk.get_client().dsn is None
