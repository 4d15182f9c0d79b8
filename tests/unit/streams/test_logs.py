"""Which log a URL means."""

import subprocess
import sys
from pathlib import Path

import pytest

from streams.embedded import EmbeddedLog
from streams.errors import BadSettings
from streams.log import StreamSpec
from streams.logs import open_log
from streams.rabbitmq import RabbitLog


async def test_file_is_made_at_an_absolute_path_when_there_are_four_slashes(tmp_path: Path) -> None:
    """As in the URL of the database that stands beside it in the settings."""
    log = open_log(f"embedded:///{tmp_path}/log.db")
    await log.open()
    await log.close()

    assert (tmp_path / "log.db").exists()


async def test_file_is_made_in_the_working_folder_when_there_are_three_slashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path is relative to where the program runs."""
    monkeypatch.chdir(tmp_path)
    log = open_log("embedded:///log of today.db")
    await log.open()
    await log.declare(StreamSpec("imports"))
    await log.close()

    assert isinstance(log, EmbeddedLog)
    assert (tmp_path / "log of today.db").exists()


@pytest.mark.parametrize("scheme", ["rabbitmq-stream", "rabbitmq-stream+tls"])
def test_broker_is_meant_when_the_scheme_says_so(scheme: str) -> None:
    """With and without TLS; nothing is connected yet."""
    log = open_log(f"{scheme}://user:secret@broker.example.com:5552/vhost")

    assert isinstance(log, RabbitLog)
    assert "secret" not in repr(log)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "log.db",
        "kafka://u:secret@host/",
        "embedded://log.db",
        "embedded:///",
        "amqp://u:secret@host/",
        "rabbitmq://h",
    ],
)
def test_url_is_refused_when_it_names_no_log(url: str) -> None:
    """The refusal says what would be right and does not repeat a URL that may hold a password."""
    with pytest.raises(BadSettings, match="embedded:///") as refused:
        open_log(url)

    assert "secret" not in str(refused.value)


def test_broker_client_is_not_loaded_when_the_log_is_embedded(tmp_path: Path) -> None:
    """The demo runs where the client may be missing or broken."""
    program = (
        "import sys\nfrom streams.logs import open_log\n"
        f"open_log('embedded:///{tmp_path}/log.db')\nsys.exit('rstream' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
