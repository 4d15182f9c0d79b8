"""Where the broker is: the LOG_URL of RabbitMQ, taken apart. No socket, no rstream, no password in any text."""

from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

from streams.errors import BadSettings

SHAPE = "rabbitmq-stream[+tls]://user:password@host:port/vhost"
PORTS = {"rabbitmq-stream": 5552, "rabbitmq-stream+tls": 5551}


@dataclass(frozen=True, slots=True)
class Address:
    """A broker as it is reached from here, and as whom. The representation leaves the password out."""

    host: str
    port: int
    vhost: str
    username: str
    password: str = field(repr=False)
    tls: bool

    def __str__(self) -> str:
        return f"{self.host}:{self.port} (vhost {self.vhost!r}, user {self.username!r})"


def parse_url(url: str) -> Address:
    """Take `rabbitmq-stream[+tls]://user:password@host:port/vhost` apart.

    User, password and vhost are percent-decoded; without port it is 5552, with TLS 5551; without vhost (or with a bare
    slash) it is "/". Raises BadSettings, whose text repeats nothing of the URL: a password with a bare `/`, `?` or `#`
    in it turns up in any other part.
    """
    parts = _split(url)
    if parts.scheme not in PORTS:
        raise BadSettings(f"LOG_URL must look like {SHAPE}")
    if parts.query or parts.fragment or parts.path.count("/") > 1:
        raise BadSettings(
            f"LOG_URL must look like {SHAPE}, nothing after the vhost; write /, ? and # within user, password "
            "and vhost as %2F, %3F and %23"
        )
    if not parts.username or not parts.password:
        raise BadSettings(f"LOG_URL must name user and password: {SHAPE}")
    if not parts.hostname:
        raise BadSettings(f"LOG_URL must name a host: {SHAPE}")
    return Address(
        host=parts.hostname,
        port=_port(parts),
        vhost=unquote(parts.path.removeprefix("/")) or "/",
        username=unquote(parts.username),
        password=unquote(parts.password),
        tls=parts.scheme.endswith("+tls"),
    )


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # its text holds a part of the URL
        raise BadSettings(f"LOG_URL is no URL; it must look like {SHAPE}") from None


def _port(parts: SplitResult) -> int:
    try:
        port = parts.port
    except ValueError:  # its text holds what stands where the port should be, perhaps a piece of the password
        port = 0
    if port == 0:
        raise BadSettings(
            "LOG_URL must have a port from 1 to 65535 or none; write :, @ and / within user and password "
            "as %3A, %40 and %2F"
        ) from None
    return port or PORTS[parts.scheme]
