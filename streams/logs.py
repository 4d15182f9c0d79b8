"""Which log a URL means. Each is imported only when a URL asks for it: the embedded one must work without a broker."""

from pathlib import Path

from streams.errors import BadSettings
from streams.log import Log

EMBEDDED = "embedded:///"
RABBITMQ = ("rabbitmq-stream://", "rabbitmq-stream+tls://")


def open_log(url: str, *, ca_file: Path | None = None, heartbeat: int = 5, label: str = "afluente") -> Log:
    """The log that `url` names, not opened yet. BadSettings when it names none; the text does not show the URL.

    `embedded:///relative/file.db` and `embedded:////absolute/file.db` (as in SQLAlchemy's URLs of SQLite), or
    `rabbitmq-stream[+tls]://user:password@host:port/vhost`. The other arguments are those of `RabbitLog`.
    """
    if url.startswith(EMBEDDED) and url != EMBEDDED:
        from streams.embedded import EmbeddedLog  # noqa: PLC0415

        return EmbeddedLog(Path(url.removeprefix(EMBEDDED)))
    if url.startswith(RABBITMQ):
        from streams.rabbitmq import RabbitLog  # noqa: PLC0415

        return RabbitLog(url, ca_file=ca_file, heartbeat=heartbeat, label=label)
    raise BadSettings(
        "The log's URL must be embedded:///relative/file.db, embedded:////absolute/file.db, "
        "or rabbitmq-stream://user:password@host:port/vhost (rabbitmq-stream+tls:// with TLS)."
    )
