"""LOG_URL of RabbitMQ: what it may look like, and that no text repeats it."""

from pathlib import Path

import pytest

from streams._rabbitmq_url import Address, parse_url
from streams.errors import BadSettings
from streams.rabbitmq import RabbitLog


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("rabbitmq-stream://u:p@host", Address("host", 5552, "/", "u", "p", tls=False)),
        ("rabbitmq-stream://u:p@host/", Address("host", 5552, "/", "u", "p", tls=False)),
        ("rabbitmq-stream://u:p@host/%2F", Address("host", 5552, "/", "u", "p", tls=False)),
        ("rabbitmq-stream://u:p@host:1/mail", Address("host", 1, "mail", "u", "p", tls=False)),
        ("rabbitmq-stream+tls://u:p@host", Address("host", 5551, "/", "u", "p", tls=True)),
        ("rabbitmq-stream+tls://u:p@host:5671/a%2Fb", Address("host", 5671, "a/b", "u", "p", tls=True)),
        ("rabbitmq-stream://u%40x:p%2F%3A%40%23@host", Address("host", 5552, "/", "u@x", "p/:@#", tls=False)),
        ("rabbitmq-stream://u:p@[::1]:5552/", Address("::1", 5552, "/", "u", "p", tls=False)),
    ],
)
def test_url_is_taken_apart_when_it_is_complete(url: str, address: Address) -> None:
    """Percent-decoded, with the default ports and vhost."""
    assert parse_url(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "amqp://u:hidden@host",
        "rabbitmq-stream://host",
        "rabbitmq-stream://u@host",
        "rabbitmq-stream://:hidden@host",
        "rabbitmq-stream://u:hidden@",
        "rabbitmq-stream://u:hidden@host:port",
        "rabbitmq-stream://u:hidden@host:0",
        "rabbitmq-stream://u:hidden@host:70000",
        "rabbitmq-stream://u:hidden@host/a/b",
        "rabbitmq-stream://u:hidden@host/?heartbeat=5",
        "rabbitmq-stream://u:hid/hidden@host",
        "rabbitmq-stream://u:hid#hidden@host",
        "rabbitmq-stream://u:hid?hidden@host",
        "rabbitmq-stream://u:hid:hidden@[host",
        "hidden",
    ],
)
def test_text_names_the_setting_and_hides_the_password_when_the_url_is_wrong(url: str) -> None:
    """A password with a character that should have been encoded turns up in any part of the URL."""
    with pytest.raises(BadSettings, match="LOG_URL") as caught:
        parse_url(url)

    error: BaseException | None = caught.value
    assert "hid" not in str(error)
    assert error is not None
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None


def test_password_is_hidden_when_the_address_or_the_log_is_shown() -> None:
    """Both end up in texts of errors and in logs."""
    url = "rabbitmq-stream://u:hidden@host:5552/"

    assert "hidden" not in f"{parse_url(url)} {parse_url(url)!r} {RabbitLog(url)!r}"


def test_ca_file_is_refused_when_the_url_is_without_tls(tmp_path: Path) -> None:
    """Whoever names an authority wants TLS, and would be left without."""
    with pytest.raises(BadSettings, match=r"rabbitmq-stream\+tls"):
        RabbitLog("rabbitmq-stream://u:p@host", ca_file=tmp_path / "ca.pem")


def test_ca_file_is_refused_when_it_cannot_be_read(tmp_path: Path) -> None:
    """Missing, or not PEM."""
    (tmp_path / "empty.pem").write_text("nothing")
    for name in ("missing.pem", "empty.pem"):
        with pytest.raises(BadSettings, match=name):
            RabbitLog("rabbitmq-stream+tls://u:p@host", ca_file=tmp_path / name)
