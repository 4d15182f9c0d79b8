"""Each processor by its name, put together from the settings with all that it is given.

Not here: what they share (`_house.py`), and how they run (`_serve.py`).
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from pydantic import SecretStr

from models.outbox import OutboxEvent
from models.registration import MAILABLE
from processors import admin, intake, outbox_relay
from processors._amqp import Connection, vhost
from processors._forecast import Pointer
from processors._house import House, outbox_limits, repayments_limits
from processors._management import Management
from processors._queues import Queues
from processors._repayment_request import requests_spec
from processors._settings import Settings
from processors.mailer import processor as mailer
from processors.mailer import smtp
from processors.mailer.mail import Frame, Sender
from processors.mailer.mailable import load_mailable
from processors.outbox_relay import OutboxRelay, Pruner
from processors.repayments import processor as repayments
from processors.repayments.gateway import Gateway
from processors.splitter import processor as splitter
from processors.sync import processor as sync
from streams.dead_letter_tail import DeadLetterTail
from streams.listener import Listener
from streams.log import StreamSpec
from streams.message import Message
from streams.relay import Relay, Source, Tail
from streams.runtime import Runtime
from streams.transforms import TransformRuntime


class Runner(Protocol):
    """A processor that is ready to run; it ends by itself some time after `stop` is set."""

    async def run(self, stop: asyncio.Event) -> None: ...


# ---- streams


def imports_spec(settings: Settings) -> StreamSpec:
    """The stream of import lists."""
    return _spec(settings, settings.imports_stream, 0)


def recipients_spec(settings: Settings) -> StreamSpec:
    """The super stream with a message per recipient."""
    return _spec(settings, settings.recipients_stream, settings.recipients_partitions)


def outbox_spec(settings: Settings) -> StreamSpec:
    """The super stream with a message per event."""
    return _spec(settings, settings.outbox_stream, settings.outbox_partitions)


def dead_letters_spec(settings: Settings) -> StreamSpec:
    """The stream of dead letters."""
    return _spec(settings, settings.dead_letters_stream, 0)


def _spec(settings: Settings, name: str, partitions: int) -> StreamSpec:
    s = settings
    return StreamSpec(name, partitions, s.stream_max_age_seconds, s.stream_max_bytes, s.stream_segment_bytes)


# ---- processors


def queues(settings: Settings) -> Queues:
    """The publisher's exchange and queue."""
    return Queues(settings.amqp_exchange, settings.amqp_routing_key, settings.amqp_queue)


async def connect_amqp(settings: Settings, label: str) -> Connection:
    """A connection to the broker of AMQP_URL. Raises BadSettings, AmqpLost and AmqpRefused."""
    url = settings.require("AMQP_URL").amqp_url or SecretStr("")
    return await Connection.open(url.get_secret_value(), label, settings.amqp_ca_file)


def management(settings: Settings) -> Management | None:
    """The management interface of MANAGEMENT_URL, if there is one, for the vhost of AMQP_URL."""
    if settings.management_url is None or settings.amqp_url is None:
        return None
    return Management(settings.management_url.get_secret_value(), vhost(settings.amqp_url.get_secret_value()))


def _intake(house: House) -> Runner:
    s = house.settings
    policy = intake.Policy(s.amqp_prefetch, s.amqp_retry_waits_seconds, s.amqp_retry_limit, s.amqp_max_body_bytes)
    runner = intake.Intake(
        queues(s),
        policy,
        partial(connect_amqp, s, "afluente intake"),
        management(s),
        house.log,
        s.imports_stream,
        house.metrics,
    )
    house.checks[intake.NAME] = runner.not_ready
    return runner


def _splitter(house: House) -> Runner:
    s = house.settings
    transform = splitter.Splitter(s.imports_stream, s.recipients_stream)
    return TransformRuntime(transform, house.log, house.engine, house.limits, house.metrics)


def _outbox_relay(house: House) -> Runner:
    s = house.settings
    sources: list[Source] = [
        Tail(mailer.TABLE, s.recipients_stream, mailer.NAME, mailer.retry_message),
        Tail(sync.TABLE, s.outbox_stream, sync.NAME, sync.event_message),
        Tail(repayments.TABLE, s.repayment_requests_stream, repayments.NAME, repayments.retry_message),
        DeadLetterTail(s.dead_letters_stream),
    ]
    days = s.outbox_retention_days
    pruner = Pruner(house.engine, days, house.limits.database_away) if days else None
    listener = Listener(house.engine)
    return OutboxRelay([_relay(house, source, listener) for source in sources], pruner)


def _relay(house: House, source: Source, listener: Listener) -> Relay:
    return Relay(source, house.log, house.engine, house.limits, house.metrics, listener=listener)


class _Connections(Protocol):
    async def close(self) -> None: ...


class _Connected:
    """A row processor with its connections to the outside, which are closed after it."""

    def __init__(self, runtime: Runtime, connections: _Connections) -> None:
        self._runtime, self._connections = runtime, connections

    async def run(self, stop: asyncio.Event) -> None:
        try:
            await self._runtime.run(stop)
        finally:
            await self._connections.close()


def _mailer(house: House) -> Runner:
    s = house.settings.require("SMTP_HOST", "MAIL_FROM")
    address = s.mail_from or ""
    pool = smtp.Pool(_smtp_config(s), s.slots)
    processor = mailer.Mailer(
        s.recipients_stream,
        load_mailable(MAILABLE, s.mail_templates),
        Frame(_sender(s)),
        pool,
        envelope_from=s.mail_envelope_from or address,
        message_id_domain=s.mail_message_id_domain or address.rpartition("@")[2],
        permanent_5xx_is_final=s.permanent_5xx_is_final,
    )
    return _Connected(Runtime(processor, house.log, house.engine, house.limits, house.metrics), pool)


def _sync(house: House) -> Runner:
    from processors._http.sender import Sender as HttpSender  # noqa: PLC0415 - the HTTP client: 12 MB no other needs

    s = house.settings
    sender = HttpSender(s.outbox_ca_file)
    processor = sync.Sync(s.outbox_stream, s, sender)
    lanes = processor.lanes(s.outbox_slots_per_target)
    limits = outbox_limits(s)
    return _Connected(Runtime(processor, house.log, house.engine, limits, house.metrics, lanes=lanes), sender)


def _admin(house: House) -> Runner:
    from processors.admin.office import open_office  # noqa: PLC0415 - a web server that no other needs
    from processors.admin.server import Admin  # noqa: PLC0415

    return Admin(open_office(house.settings, house.engine, house.log))


def _repayments(house: House) -> Runner:
    from processors._http.sender import Sender as HttpSender  # noqa: PLC0415 - as above

    s = house.settings.require("ASAAS_API_URL", "ASAAS_API_TOKEN")
    sender = HttpSender(s.asaas_ca_file)
    token = s.asaas_api_token or SecretStr("")
    gateway = Gateway(sender, s.asaas_api_url or "", token.get_secret_value(), s.asaas_timeout, repayments.AGENT)
    limits = repayments_limits(s)
    processor = repayments.Repayments(s.repayment_requests_stream, gateway, house.engine, limits.database_away)
    lanes = processor.lanes(limits.slots)
    return _Connected(Runtime(processor, house.log, house.engine, limits, house.metrics, lanes=lanes), sender)


def _smtp_config(settings: Settings) -> smtp.SmtpConfig:
    s = settings
    return smtp.SmtpConfig(
        s.smtp_host or "",
        s.smtp_port,
        s.smtp_security,
        username=s.smtp_username,
        password=s.smtp_password.get_secret_value() if s.smtp_password else None,
        ca_file=str(s.smtp_ca_file) if s.smtp_ca_file else None,
        local_hostname=s.smtp_local_hostname,
        connect_timeout=s.smtp_connect_timeout_seconds,
        reply_timeout=s.reply_timeout,
    )


def _sender(settings: Settings) -> Sender:
    s = settings
    lists = (("List-Id", s.mail_list_id), ("List-Unsubscribe", s.mail_list_unsubscribe))
    return Sender(
        s.mail_from or "",
        s.mail_from_name or "",
        s.mail_reply_to,
        tuple((name, value) for name, value in lists if value is not None),
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """A processor that can be run: the streams that it needs, and how it is built."""

    build: Callable[[House], Runner]
    streams: tuple[Callable[[Settings], StreamSpec], ...]
    reads: Callable[[Settings], str] | None = None
    """The name of the stream in which it has a position."""
    new_keys: Callable[[Message], list[str]] | None = None
    """The keys of the e-mails that a record of its stream makes, where they have no row yet. Raises Reject."""
    points_at: Pointer | None = None
    """The rows that the records of its stream point at, where they are nothing but hints."""
    needs: tuple[str, ...] = ()
    """Settings that have no default and that only this one requires."""
    database: bool = True
    """Whether it uses the database at all; if not, it works while the database is away."""
    log: bool = True
    """Whether it needs the log from its start on; if not, it opens it when it first needs it."""
    optional: bool = False
    """Left out of "all" where what it needs is not set."""


PROCESSORS: dict[str, Entry] = {
    intake.NAME: Entry(_intake, (imports_spec,), needs=("AMQP_URL",), database=False, optional=True),
    splitter.NAME: Entry(
        _splitter,
        (imports_spec, recipients_spec),
        reads=lambda settings: settings.imports_stream,
        new_keys=splitter.new_keys,
    ),
    mailer.NAME: Entry(
        _mailer,
        (recipients_spec,),
        reads=lambda settings: settings.recipients_stream,
        new_keys=mailer.new_keys,
        needs=("SMTP_HOST", "MAIL_FROM"),
    ),
    sync.NAME: Entry(
        _sync,
        (outbox_spec,),
        reads=lambda settings: settings.outbox_stream,
        points_at=Pointer(OutboxEvent, sync.row_id),
    ),
    repayments.NAME: Entry(
        _repayments,
        (requests_spec,),
        reads=lambda settings: settings.repayment_requests_stream,
        needs=("ASAAS_API_URL", "ASAAS_API_TOKEN"),
        optional=True,
    ),
    outbox_relay.NAME: Entry(_outbox_relay, (recipients_spec, outbox_spec, requests_spec, dead_letters_spec)),
    admin.NAME: Entry(_admin, (), needs=("ADMIN_SECRET_KEY", "ADMIN_USERS"), log=False, optional=True),
}
"""Every processor by its name: that of its Deployment, and of its label in metrics."""


def check(settings: Settings, names: Iterable[str]) -> None:
    """Raise BadSettings that names every setting which these processors need and do not find."""
    settings.require(*dict.fromkeys(need for name in names for need in PROCESSORS[name].needs))


def all_names(settings: Settings) -> list[str]:
    """Every processor, except an optional one whose settings are not there."""

    def is_meant(entry: Entry) -> bool:
        return not entry.optional or all(getattr(settings, need.lower()) is not None for need in entry.needs)

    return [name for name, entry in PROCESSORS.items() if is_meant(entry)]


def uses_database(names: Iterable[str]) -> bool:
    """Whether any of these processors uses the database."""
    return any(PROCESSORS[name].database for name in names)


def uses_log(names: Iterable[str]) -> bool:
    """Whether any of these processors needs the log all the time."""
    return any(PROCESSORS[name].log for name in names)


def streams(settings: Settings) -> list[StreamSpec]:
    """Every stream that any processor needs."""
    return list(dict.fromkeys(make(settings) for entry in PROCESSORS.values() for make in entry.streams))


def readers(settings: Settings) -> dict[str, str]:
    """Which processor reads which stream."""
    return {name: entry.reads(settings) for name, entry in PROCESSORS.items() if entry.reads is not None}
