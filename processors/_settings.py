"""The environment, read once, typed. Every setting that exists is here, and `.env.example` lists them in this order.

Each is named in the environment as here in capitals. Secrets and addresses of services have no default, so that nothing
talks to the wrong service because a variable was forgotten. An empty variable counts as not set.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    DirectoryPath,
    Field,
    FilePath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    StringConstraints,
    ValidationError,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from streams.errors import BadSettings
from streams.recovery import OnUnknown

DEFAULT_REPLY_TIMEOUT_SECONDS = 15.0
DATABASE_SCHEMES = ("postgresql+asyncpg://", "sqlite+aiosqlite:///")
LOG_SCHEMES = ("rabbitmq-stream://", "rabbitmq-stream+tls://", "embedded:///")
AMQP_SCHEMES = ("amqp://", "amqps://")
MANAGEMENT_SCHEMES = ("http://", "https://")
OUTBOX_MARGIN_SECONDS = 1.0
"""Beyond the time-out of a request: what is left for its dispatcher, and for an act to end by itself."""


def _one_of(schemes: tuple[str, ...]) -> Callable[[SecretStr], SecretStr]:
    """A check of how a URL begins; its message shows none of the URL, which may hold a password."""

    def check(url: SecretStr) -> SecretStr:
        if not url.get_secret_value().startswith(schemes):
            raise ValueError(f"it must begin with {' or '.join(schemes)}")
        return url

    return check


def _token(secret: SecretStr) -> SecretStr:
    """What stands in a header: a line break in it would begin another one."""
    if not re.fullmatch(r"[\x21-\x7e]+", secret.get_secret_value()):
        raise ValueError("it must be printable ASCII without blanks")
    return secret


def _key(secret: SecretStr) -> SecretStr:
    """What signs must not be guessed."""
    if len(secret.get_secret_value().encode()) < 32:
        raise ValueError("it must have at least 32 bytes")
    return secret


_USER = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}(:viewer)?:\$argon2id\$[\x21-\x7e]+")


def _users(users: SecretStr) -> SecretStr:
    """Who may sign in; the message shows none of them."""
    entries = [entry.strip() for entry in users.get_secret_value().split(";") if entry.strip()]
    wrong = [number for number, entry in enumerate(entries, 1) if not _USER.fullmatch(entry)]
    if wrong or not entries:
        raise ValueError(f"entry {wrong[0] if wrong else 1} must be name:hash or name:viewer:hash")
    if len({entry.partition(":")[0] for entry in entries}) < len(entries):
        raise ValueError("a name stands there twice")
    return users


def _numbers(value: object) -> object:
    """A list as people write it in an environment: numbers or words with commas between them."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


DatabaseUrl = Annotated[SecretStr, AfterValidator(_one_of(DATABASE_SCHEMES))]
LogUrl = Annotated[SecretStr, AfterValidator(_one_of(LOG_SCHEMES))]
AmqpUrl = Annotated[SecretStr, AfterValidator(_one_of(AMQP_SCHEMES))]
ManagementUrl = Annotated[SecretStr, AfterValidator(_one_of(MANAGEMENT_SCHEMES))]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
# Longer names do not leave room for ".dlx" and ".dlq" in the 255 bytes that AMQP allows.
AmqpName = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]+$", max_length=200)]
# What ends up in a mail header or an SMTP command: a line break in it would begin a header of somebody else's choice.
Line = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=500)]
Address = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_.!#$%&'*+/=?^`{|}~-]+@[A-Za-z0-9][A-Za-z0-9.-]*$", max_length=254)
]
ApiUrl = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$", max_length=500)]
Token = Annotated[SecretStr, AfterValidator(_token)]
Port = Annotated[int, Field(ge=0, le=65535)]
Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_numbers)]
SigningKey = Annotated[SecretStr, AfterValidator(_key)]
Users = Annotated[SecretStr, AfterValidator(_users)]
Seconds = Annotated[tuple[PositiveFloat, ...], NoDecode, BeforeValidator(_numbers), Field(min_length=1)]


class Settings(BaseSettings):
    """All settings, flat. Build it with `load_settings`, whose errors name variables; times are in seconds."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="ignore",  # the environment and a shared .env hold other programs' variables too
        allow_inf_nan=False,
        hide_input_in_errors=True,
        env_ignore_empty=True,
        env_file_encoding="utf-8",
    )

    # database
    database_url: DatabaseUrl = Field(
        description="Where rows, offsets and dead letters live: postgresql+asyncpg:// or sqlite+aiosqlite:///"
    )

    # log
    log_url: LogUrl = Field(
        description="The streams: rabbitmq-stream://, rabbitmq-stream+tls:// or embedded:/// and the path of a file"
    )
    log_heartbeat_seconds: PositiveInt = Field(
        5, description="A broker that is silent for twice as long counts as gone"
    )
    log_ca_file: FilePath | None = Field(
        None, description="Certificates that the broker's is checked against; empty: the system's own"
    )

    # streams
    imports_stream: Name = Field("imports", description="Name of the stream that batches are written to")
    recipients_stream: Name = Field("recipients", description="Name of the super stream with a message per recipient")
    recipients_partitions: PositiveInt = Field(
        3, description="Partitions of the super stream, and so the most mailers that work at once"
    )
    outbox_stream: Name = Field("outbox", description="Name of the super stream with a message per event")
    outbox_partitions: PositiveInt = Field(3, description="Its partitions, and so the most syncs that work at once")
    repayment_requests_stream: Name = Field(
        "repayment-requests", description="Name of the stream with a message per repayment that is asked for"
    )
    dead_letters_stream: Name = Field("dead-letters", description="Name of the stream with what was given up")
    stream_max_age_seconds: PositiveInt = Field(
        7 * 24 * 3600, description="Retention by age: older segments are dropped"
    )
    stream_max_bytes: PositiveInt = Field(
        5 * 1024**3, description="Retention by size of each partition: the oldest segments are dropped"
    )
    stream_segment_bytes: PositiveInt = Field(
        100 * 1024**2, description="Size of a segment, the unit in which retention drops"
    )

    # AMQP
    amqp_url: AmqpUrl | None = Field(
        None, description="The publisher's broker: amqp://user:password@host:5672/vhost or amqps:// (intake needs it)"
    )
    amqp_ca_file: FilePath | None = Field(
        None, description="Certificates that this broker's is checked against; empty: the system's own"
    )
    amqp_exchange: AmqpName = Field("exchange_notification", description="The exchange that the publisher declares")
    amqp_routing_key: AmqpName = Field("module_import_registration_draft", description="The key that it publishes with")
    amqp_queue: AmqpName = Field("queue_import_registration", description="The queue that it declares")
    amqp_prefetch: int = Field(1, ge=1, le=100, description="How many lists one intake has in hand at once")
    amqp_retry_waits_seconds: Seconds = Field(
        (1, 5, 30, 120), description="Waits before a list is put back when the stream is away; the last one repeats"
    )
    amqp_retry_limit: NonNegativeInt = Field(4, description="How often a list is put back before it is a dead letter")
    amqp_max_body_bytes: PositiveInt = Field(16 * 1024**2, description="A larger list is a dead letter")
    management_url: ManagementUrl | None = Field(
        None, description="RabbitMQ's management, http[s]://user:password@host:15672, to see and set policies"
    )

    # engine
    turn_records: PositiveInt = Field(300, description="The most records that one turn of a processor takes")
    slots: PositiveInt = Field(16, description="How many rows of one process are acted upon at once")
    in_doubt_limit: PositiveInt | None = Field(
        None, description="How many mails of one process a kill may repeat at most; empty: as many as slots"
    )
    act_timeout_seconds: PositiveFloat = Field(60, description="Bound of one act: connection, mail and reply in all")
    reply_timeout_seconds: PositiveFloat | None = Field(
        None, description="Bound of the wait for the reply to a whole mail; empty: half an act, at most 15"
    )
    commit_allowance_seconds: PositiveFloat = Field(30, description="How long the commit of an outcome may take")
    clock_step_seconds: NonNegativeFloat = Field(30, description="How far the database's clock may jump")
    lease_seconds: PositiveFloat | None = Field(
        None, description="How long a claim lasts; empty: act time-out + commit allowance + clock step"
    )
    max_attempts: PositiveInt = Field(3, description="Tries of a row before it is failed")
    backoff_seconds: Seconds = Field(
        (60, 300, 900), description="Waits between tries, with commas; the last one repeats"
    )
    backoff_jitter: float = Field(0.2, ge=0, le=10, description="How far waits are spread: 0.2 is up to 20 % longer")
    on_unknown_outcome: OnUnknown = Field(
        OnUnknown.RESEND, description="A mail that may have arrived: resend it, or hold it for a person to decide"
    )
    permanent_5xx_is_final: bool = Field(False, description="Whether a 5xx reply fails a mail without further tries")
    breaker_threshold: PositiveInt = Field(
        20, description="After how many different rows that fail alike in a row nothing more is claimed"
    )
    breaker_probe_seconds: PositiveFloat = Field(5, description="Wait before the provider is probed; doubles each time")
    breaker_probe_max_seconds: PositiveFloat = Field(60, description="The longest wait between two probes")
    idle_look_seconds: PositiveFloat = Field(3, description="How often an idle processor looks for a pause or a replay")

    # relay
    relay_poll_seconds: PositiveFloat = Field(1, description="How often the relay looks for due rows unasked")
    relay_batch: PositiveInt = Field(500, description="The most rows that the relay reserves at once")
    queued_visibility_seconds: PositiveFloat = Field(
        60, description="When a row is published anew although a message for it should be under way"
    )
    repeat_lag_limit: PositiveInt = Field(1000, description="A partition that is further behind gets no repeats")

    # outbox
    outbox_max_attempts: PositiveInt = Field(3, description="Tries of an event before it is failed")
    outbox_retry_seconds: PositiveFloat = Field(5, description="Wait between two tries of an event")
    outbox_timeout_seconds: PositiveFloat = Field(3, description="Bound of a request, from connection to whole answer")
    outbox_slots: PositiveInt = Field(64, description="How many events of one process are sent at once")
    outbox_slots_per_target: PositiveInt = Field(32, description="How many of them at once to the same system")
    outbox_ca_file: FilePath | None = Field(
        None, description="Certificates that the systems' are checked against; empty: this machine's own"
    )
    outbox_retention_days: NonNegativeFloat = Field(
        30, description="The relay deletes sent events that are older; 0: never"
    )
    new_checkout_api_url: ApiUrl | None = Field(
        None, description="The new checkout's API (new_checkout.repayment_sync needs it): https://host/base"
    )
    new_checkout_api_token: Token | None = Field(None, description="Its bearer token")

    # repayments
    asaas_api_url: ApiUrl | None = Field(
        None, description="The payment gateway's API (repayments needs it): https://api.asaas.com or its sandbox"
    )
    asaas_api_token: Token | None = Field(None, description="Its access token")
    asaas_timeout_seconds: PositiveFloat | None = Field(
        None, description="Bound of one request to it; empty: a third of an act, at most 10"
    )
    asaas_ca_file: FilePath | None = Field(
        None, description="Certificates that its own is checked against; empty: this machine's own"
    )
    repayments_slots: PositiveInt = Field(4, description="How many repayments of one process are brought about at once")

    # SMTP
    smtp_host: Line | None = Field(None, description="The mail server (the mailer needs it)")
    smtp_port: Port = Field(587, description="Its port")
    smtp_security: Literal["starttls", "tls", "none"] = Field(
        "starttls", description="starttls (port 587), tls (port 465) or none (only for tests)"
    )
    smtp_username: Line | None = Field(None, description="Login name; empty: no login")
    smtp_password: SecretStr | None = Field(None, description="Login password")
    smtp_ca_file: FilePath | None = Field(
        None, description="Certificates that the server's is checked against; empty: the system's own"
    )
    smtp_local_hostname: Line | None = Field(None, description="The name said in EHLO; empty: this machine's")
    smtp_connect_timeout_seconds: PositiveFloat = Field(10, description="Bound of connection, TLS and login")
    smtp_rate_per_second: PositiveFloat | None = Field(
        None, description="The most mails per second and process; empty: as fast as the server takes them"
    )

    # mail
    mail_from: Address | None = Field(None, description="Address in From (the mailer needs it)")
    mail_from_name: Line | None = Field(None, description="Name in From")
    mail_envelope_from: Address | None = Field(None, description="Where bounces go; empty: MAIL_FROM")
    mail_reply_to: Address | None = Field(None, description="Reply-To; empty: no such header")
    mail_message_id_domain: Name | None = Field(None, description="Domain of Message-ID; empty: that of MAIL_FROM")
    mail_list_id: Line | None = Field(None, description="List-Id; empty: no such header")
    mail_list_unsubscribe: Line | None = Field(None, description="List-Unsubscribe; empty: no such header")
    mail_templates: DirectoryPath | None = Field(
        None, description="Folder of templates to use in place of the own ones"
    )

    # admin
    admin_host: Line = Field("127.0.0.1", description="Where the operators' page answers; a pod needs 0.0.0.0")
    admin_port: Port = Field(8081, description="Its port; 0 takes any free one")
    admin_secret_key: SigningKey | None = Field(
        None, description="Signs sessions: at least 32 random characters (admin needs it); a new one ends all sessions"
    )
    admin_users: Users | None = Field(
        None,
        description="Who may sign in: name:hash, or name:viewer:hash for looking only, with ; between them "
        "(admin needs it); `afluente admin hash-password` makes a hash",
    )
    admin_allowed_hosts: Words = Field(
        ("localhost", "127.0.0.1"), description="The names under which browsers reach the page, with commas"
    )
    admin_trusted_proxies: Words = Field(
        (), description="Addresses or networks of proxies whose X-Forwarded-For is believed, with commas; empty: none"
    )
    admin_cookie_secure: bool = Field(True, description="false only for plain http on this machine")
    admin_idle_seconds: PositiveInt = Field(1800, description="A session without a click ends after so long")
    admin_session_seconds: PositiveInt = Field(8 * 3600, description="Any session ends after so long")

    # process
    probes_host: Line = Field("127.0.0.1", description="Where probes and metrics answer; a pod needs 0.0.0.0")
    probes_port: Port = Field(8080, description="Their port; 0 takes any free one")
    shutdown_grace_seconds: PositiveFloat = Field(
        25, description="How long a stop waits for what is in flight; less than the pod's own grace period"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="The least grave lines to log")
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="Log lines for people or for machines; auto: console on a terminal, else json"
    )

    # Sentry
    sentry_dsn: SecretStr | None = Field(None, description="Where final failures are reported; empty: nowhere")
    sentry_environment: Line = Field("production", description="The environment named in these reports")

    @property
    def lease(self) -> float:
        """Seconds that a claim lasts."""
        total = self.act_timeout_seconds + self.commit_allowance_seconds + self.clock_step_seconds
        return self.lease_seconds or total

    @property
    def reply_timeout(self) -> float:
        """Seconds to wait for the reply after the final dot."""
        return self.reply_timeout_seconds or min(DEFAULT_REPLY_TIMEOUT_SECONDS, self.act_timeout_seconds / 2)

    @property
    def reserve(self) -> float:
        """Seconds that must be left of a lease for the final dot to be written."""
        return self.reply_timeout + self.commit_allowance_seconds

    @property
    def outbox_act_timeout(self) -> float:
        """Seconds that sending one event may take in all."""
        return self.outbox_timeout_seconds + OUTBOX_MARGIN_SECONDS

    @property
    def outbox_lease(self) -> float:
        """Seconds that a claim of an event lasts: as `lease`, for a shorter act."""
        return self.outbox_act_timeout + self.commit_allowance_seconds + self.clock_step_seconds

    @property
    def asaas_timeout(self) -> float:
        """Seconds that one request to the payment gateway may take; an act makes several."""
        return self.asaas_timeout_seconds or min(10.0, self.act_timeout_seconds / 3)

    @property
    def in_doubt(self) -> int:
        """How many mails of this process may be between their final dot and their commit."""
        return min(self.in_doubt_limit or self.slots, self.slots)

    def require(self, *names: str) -> Self:
        """Answer itself if all these optional variables are set, else raise `BadSettings` naming all that are not."""
        missing = [name for name in names if getattr(self, name.lower()) is None]
        if missing:
            raise BadSettings(_report([f"{name} is missing: {_description(name)}" for name in missing]))
        return self


def load_settings(env_file: Path | None = Path(".env")) -> Settings:
    """Read the environment, and below it the file if there is one.

    Raises `BadSettings`, which names at once every variable that is missing or wrong, and never shows a value.
    """
    try:
        settings = Settings(_env_file=env_file)
    except ValidationError as error:
        raise BadSettings(_report([_problem(str(e["loc"][0]), e["type"], e["msg"]) for e in error.errors()])) from None
    check_lease(settings)
    check_orders(settings)
    return settings


def check_lease(settings: Settings) -> None:
    """Refuse times under which two holders could send the same mail although none of them died.

    A lease must cover one act, the commit of its outcome and a step of the database's clock; and a mail whose final dot
    is written just in time must still get its reply and its commit within the lease. The grace period of a stop is not
    part of it: a stop that is cut short is like a kill, which the lease covers.
    """
    s = settings
    needed = s.act_timeout_seconds + s.commit_allowance_seconds + s.clock_step_seconds
    broken = []
    if s.lease < needed:
        parts = "ACT_TIMEOUT_SECONDS + COMMIT_ALLOWANCE_SECONDS + CLOCK_STEP_SECONDS"
        broken.append(f"LEASE_SECONDS >= {parts} does not hold: {s.lease:g} < {needed:g}")
    if s.reserve >= s.lease:
        parts = "REPLY_TIMEOUT_SECONDS + COMMIT_ALLOWANCE_SECONDS"
        broken.append(
            f"{parts} < LEASE_SECONDS does not hold: {s.reserve:g} >= {s.lease:g}; no mail could ever be sent"
        )
    if s.reply_timeout > s.act_timeout_seconds:
        values = f"{s.reply_timeout:g} > {s.act_timeout_seconds:g}"
        broken.append(f"REPLY_TIMEOUT_SECONDS <= ACT_TIMEOUT_SECONDS does not hold: {values}")
    if s.asaas_timeout > s.act_timeout_seconds:
        values = f"{s.asaas_timeout:g} > {s.act_timeout_seconds:g}"
        broken.append(f"ASAAS_TIMEOUT_SECONDS <= ACT_TIMEOUT_SECONDS does not hold: {values}")
    if broken:
        raise BadSettings(_report(broken))


def check_orders(settings: Settings) -> None:
    """Refuse pairs of settings of which the smaller one is larger."""
    pairs = [("breaker_probe_seconds", "breaker_probe_max_seconds"), ("stream_segment_bytes", "stream_max_bytes")]
    values = [(small, large, getattr(settings, small), getattr(settings, large)) for small, large in pairs]
    broken = [f"{s.upper()} <= {b.upper()} does not hold: {x:g} > {y:g}" for s, b, x, y in values if x > y]
    if broken:
        raise BadSettings(_report(broken))


def _problem(field: str, kind: str, message: str) -> str:
    name = field.upper()
    if kind == "missing":
        return f"{name} is missing: {_description(name)}"
    return f"{name} is wrong: {message.removeprefix('Value error, ')} ({_description(name)})"


def _description(name: str) -> str:
    return Settings.model_fields[name.lower()].description or ""


def _report(problems: list[str]) -> str:
    return "\n  ".join(["the settings cannot be used:", *problems])
