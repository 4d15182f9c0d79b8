"""The import job as a team would write it with FastStream on RabbitMQ: the peer of the mailer.

    faststream run bench.peers.faststream_app:app --workers 2

A message holds 500 registrations and is acknowledged when all of them are done (prefetch 1, so that a killed worker
gets no more back than it worked on). Rows are inserted in one statement; then so many tasks as there are connections
send and commit, one row at a time, retrying with back-off. On uvloop, with asyncpg and kept aiosmtplib connections: as
fast as this design goes. By default the mail is plain text of 2 kB, a third of the product's; BENCH_MAIL=same sends
the product's.
"""

import asyncio
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from email.mime.multipart import MIMEMultipart
from email.mime.text import MIMEText
from email.policy import compat32
from email.utils import formatdate
from typing import Any, NamedTuple

import aiosmtplib
import asyncpg
import jinja2
from faststream import AckPolicy, FastStream
from faststream.rabbit import Channel, RabbitBroker, RabbitQueue

CONNECTIONS = int(os.environ["BENCH_CONNECTIONS"])
ATTEMPTS = 3
SENDER = "nao-responda@example.com"
FIELDS = ("registration", "opp_id", "opp_name", "number", "agent_name", "agent_email")
POLICY = compat32.clone(linesep="\r\n")
ADDRESS = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+")
TEXT = "Ola, {agent_name}!\n\nA sua inscricao {number} em {opp_name} foi registrada.\n\n" + "Guarde este e-mail. " * 90

INSERT = """
INSERT INTO email_dispatches
    (idempotency_key, "to", subject, content, mailable_type, meta, status, created_at, updated_at)
SELECT k, t, s, c, 'App\\Mail\\ImporteRegistrationMail', m::json, 'pending', now(), now()
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[]) AS x (k, t, s, c, m)
ON CONFLICT (idempotency_key) DO NOTHING"""
OPEN = """
SELECT id, idempotency_key, "to", subject, content, meta FROM email_dispatches
WHERE idempotency_key = ANY($1::text[]) AND status = 'pending' ORDER BY id"""
SENT = """
UPDATE email_dispatches SET status = 'sent', attempts = attempts + 1, sent_at = now(), dispatched_at = now(),
    error_message = NULL, updated_at = now() WHERE id = $1"""
FAILED = """
UPDATE email_dispatches SET attempts = attempts + 1, error_message = $2, updated_at = now(),
    status = CASE WHEN attempts + 1 >= 3 THEN 'failed' ELSE 'pending' END WHERE id = $1 RETURNING attempts"""

broker = RabbitBroker(os.environ["BENCH_AMQP_URL"], default_channel=Channel(prefetch_count=1), logger=None)
app = FastStream(broker, logger=None)
templates = jinja2.Environment(
    loader=jinja2.FileSystemLoader(os.environ["BENCH_TEMPLATES"]), autoescape=jinja2.select_autoescape(["html"])
)
SUBJECT, BODY_TEXT, BODY_HTML = map(templates.get_template, ("subject.txt", "body.txt", "body.html"))


class Rendered(NamedTuple):
    """A row before it is inserted, in the order of the statement's parameters."""

    key: str
    to: str
    subject: str
    content: str
    meta: str


# ---- what a mail is


def plain(data: dict[str, Any]) -> tuple[str, str]:
    """Subject and content of the small mail."""
    return f"Inscricao {data['number']} registrada", TEXT.format(**data)


def html(data: dict[str, Any]) -> tuple[str, str]:
    """Subject and content of the product's mail."""
    return SUBJECT.render(data), BODY_HTML.render(data)


def plain_mail(row: Any) -> Any:
    """The small mail; MIMEText because EmailMessage takes four times its CPU."""
    return MIMEText(row["content"])


def html_mail(row: Any) -> Any:
    """The product's mail: text and HTML."""
    mail = MIMEMultipart("alternative")
    mail.attach(MIMEText(BODY_TEXT.render(json.loads(row["meta"])), "plain", "utf-8"))
    mail.attach(MIMEText(row["content"], "html", "utf-8"))
    return mail


SAME = os.environ.get("BENCH_MAIL") == "same"
render: Callable[[dict[str, Any]], tuple[str, str]] = html if SAME else plain
build: Callable[[Any], Any] = html_mail if SAME else plain_mail


def encode(row: Any) -> bytes:
    """The bytes of a row's mail."""
    mail = build(row)
    mail["From"], mail["To"], mail["Subject"] = SENDER, row["to"], row["subject"]
    mail["Date"], mail["Message-ID"] = formatdate(), f"<{row['idempotency_key'][:32]}@example.com>"
    return bytes(mail.as_bytes(policy=POLICY))


def rows(registrations: list[dict[str, Any]]) -> Iterator[Rendered]:
    """Check, render; what is invalid is left out."""
    for data in registrations:
        if not all(data.get(field) for field in FIELDS) or not ADDRESS.fullmatch(data["agent_email"]):
            continue
        line = f"{data['opp_id']}\n{data['registration']}\n{data['agent_email'].lower()}"
        key = hashlib.sha256(line.encode()).hexdigest()
        yield Rendered(key, data["agent_email"], *render(data), json.dumps(data))


# ---- the job


class Connections:
    """The pool of the database, and the kept connections to the mail server."""

    database: Any
    idle: "asyncio.Queue[aiosmtplib.SMTP]"


connections = Connections()


async def start() -> None:
    """Open the pool; SMTP connects with the first mail."""
    size = min(CONNECTIONS, 32)
    connections.database = await asyncpg.create_pool(os.environ["BENCH_DSN"], min_size=size, max_size=size)
    connections.idle = asyncio.Queue()
    host, port = os.environ["BENCH_SMTP"].split(":")
    for _ in range(CONNECTIONS):
        client = aiosmtplib.SMTP(hostname=host, port=int(port), start_tls=False, timeout=10)
        connections.idle.put_nowait(client)


async def deliver(row: Any) -> None:
    """Send and commit; up to three tries."""
    for attempt in range(ATTEMPTS):
        if await send(row):
            return
        await asyncio.sleep(2**attempt)


async def send(row: Any) -> bool:
    """One try; True when there is no other to make."""
    client = await connections.idle.get()
    try:
        if not client.is_connected:
            await client.connect()
        await client.sendmail(SENDER, [row["to"]], encode(row))
    except (aiosmtplib.SMTPException, OSError) as error:
        client.close()
        return bool(await connections.database.fetchval(FAILED, row["id"], str(error)[:500]) >= ATTEMPTS)
    finally:
        connections.idle.put_nowait(client)
    await connections.database.execute(SENT, row["id"])
    return True


async def import_registrations(message: list[dict[str, Any]]) -> None:
    """One message, to its last mail."""
    found = list(rows(message))
    await connections.database.execute(INSERT, *map(list, zip(*found, strict=True)))
    todo = iter(await connections.database.fetch(OPEN, [row.key for row in found]))

    async def work() -> None:
        for row in todo:
            await deliver(row)

    await asyncio.gather(*(work() for _ in range(CONNECTIONS)))


app.on_startup(start)
broker.subscriber(RabbitQueue(os.environ["BENCH_QUEUE"], durable=True), ack_policy=AckPolicy.NACK_ON_ERROR)(
    import_registrations
)
