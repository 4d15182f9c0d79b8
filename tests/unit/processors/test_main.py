"""The command line: what it refuses, in which words, and with which exit code."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from processors.__main__ import app
from processors._compose import PROCESSORS
from processors._settings import Settings
from streams.exit_codes import ExitCode


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without .env, in an environment without settings."""
    for name in Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def embedded(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with a database and a log in files, not migrated."""
    monkeypatch.setenv("DATABASE_URL", f"sqlite+aiosqlite:///{place / 'a.db'}")
    monkeypatch.setenv("LOG_URL", f"embedded:///{place / 'log.db'}")
    return place


@pytest.fixture
def migrated(embedded: Path) -> Path:
    """The same, migrated."""
    assert afluente("migrate").exit_code == ExitCode.OK
    return embedded


def afluente(*arguments: str, stdin: bytes | None = None) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, arguments, input=stdin, prog_name="afluente")


def words(text: str) -> str:
    """The text as one line, without frames and colours."""
    return " ".join(re.sub(r"[│╭╮╰╯─]|\x1b\[[0-9;]*m", " ", text).split())


def test_help_lists_every_command_and_exit_code() -> None:
    """Whoever is on duty finds both without the source."""
    shown = words(afluente("--help").output)

    for command in (
        "run",
        "migrate",
        "backfill",
        "pause",
        "resume",
        "replay",
        "dead-letters",
        "publish",
        "status",
        "demo",
    ):
        assert f" {command} " in shown
    for code in ExitCode:
        assert f"{code.value} {code.name.lower()}" in shown


@pytest.mark.parametrize("command", ["run", "pause", "resume"])
def test_unknown_processor_is_refused_with_the_names_that_exist(command: str, place: Path) -> None:
    """A slip of the pen must not look like a processor with nothing to do."""
    result = afluente(command, "maller")

    assert result.exit_code == ExitCode.USAGE
    assert "there is no processor 'maller'" in words(result.output)
    assert all(name in words(result.output) for name in PROCESSORS)


@pytest.mark.parametrize("command", [["run", "all"], ["migrate"], ["status"], ["pause", "mailer"]])
def test_missing_settings_name_themselves(command: list[str], place: Path) -> None:
    """All at once, so that nobody has to start four times; and without a traceback."""
    result = afluente(*command)

    assert result.exit_code == ExitCode.BAD_SETTINGS
    assert "DATABASE_URL is missing" in result.output
    assert "LOG_URL is missing" in result.output
    assert "Traceback" not in result.output


def test_mailer_does_not_start_when_its_own_settings_are_missing(embedded: Path) -> None:
    """What only one processor needs is asked for only when it is to run."""
    result = afluente("run", "splitter", "mailer")

    assert result.exit_code == ExitCode.BAD_SETTINGS
    assert "SMTP_HOST is missing" in result.output
    assert "MAIL_FROM is missing" in result.output


@pytest.mark.parametrize("command", [["status"], ["pause", "mailer"], ["resume", "mailer"], ["backfill"]])
def test_database_that_is_not_migrated_is_named(command: list[str], embedded: Path) -> None:
    """The sentence says what to do."""
    result = afluente(*command)

    assert result.exit_code == ExitCode.NOT_MIGRATED
    assert "afluente migrate" in result.output
    assert "Traceback" not in result.output


def test_migrating_again_does_nothing(migrated: Path) -> None:
    """Every pod may do it at its start."""
    result = afluente("migrate")

    assert result.exit_code == ExitCode.OK
    assert "nothing to do" in result.output


def test_revision_that_does_not_exist_is_refused(embedded: Path) -> None:
    """It is named, in a sentence."""
    result = afluente("migrate", "--revision", "9999")

    assert result.exit_code == ExitCode.USAGE
    assert "9999" in result.output


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'[{"registration": 1,]', "not JSON"),
        (b"[1, NaN]", "line 1"),
        (b'{"registration": 1}', "not an array"),
        (b'[{"agent_name": "Jos\xe9"}]', "not UTF-8 at byte 20"),
        (b"\xef\xbb\xbf[]", "byte order mark"),
        (b"", "not JSON"),
    ],
)
def test_body_that_is_no_list_is_refused_and_nothing_is_published(body: bytes, says: str, migrated: Path) -> None:
    """It says what is wrong and where, and quotes nothing: it may be somebody's name."""
    (migrated / "batch.json").write_bytes(body)

    for result in (afluente("publish", "batch.json"), afluente("publish", "-", stdin=body)):
        assert result.exit_code == ExitCode.BAD_INPUT
        assert says in result.output
        assert "nothing was published" in result.output
        assert "Jos" not in result.output
    assert json.loads(afluente("status", "--json").stdout)["processors"] == []


def test_file_that_does_not_exist_is_refused(embedded: Path) -> None:
    """Before anything is opened."""
    result = afluente("publish", "nowhere.json")

    assert result.exit_code == ExitCode.USAGE
    assert "nowhere.json" in result.output


def test_item_above_the_size_limit_is_reported_with_its_index(migrated: Path) -> None:
    """The others are published; the splitter rejects this one, so that it is counted."""
    items = [{"registration": 1}, {"registration": 2, "agent_name": "x" * 600_000}, {"registration": 3}]

    result = afluente("publish", "-", stdin=json.dumps(items).encode())

    assert result.exit_code == ExitCode.OK
    assert re.search(r"item 1 has 600,\d{3} bytes", result.output)
    assert "3 registrations" in result.output


@pytest.mark.parametrize(
    "command",
    [
        ["outbox", "retry", "--by", "ana"],
        ["repayment", "retry", "--by", "ana"],
        ["dead-letters", "show"],
        ["dead-letters", "redrive", "--by", "ana", "--id"],
        ["dead-letters", "list", "--limit"],
        ["status", "--batches"],
    ],
    ids=" ".join,
)
def test_number_that_no_row_can_have_is_refused(command: list[str], migrated: Path) -> None:
    """By name, and not by what the database's driver makes of it."""
    result = afluente(*command, str(2**63))

    assert result.exit_code == ExitCode.USAGE
    assert f"less than or equal to {2**63 - 1}" in words(result.output)


def test_processor_that_never_ran_cannot_be_paused(migrated: Path) -> None:
    """There is no row that could say so, and to seem paused would be a lie."""
    result = afluente("pause", "mailer")

    assert result.exit_code == ExitCode.FAILED
    assert "mailer has never run here" in result.output


def test_processor_without_a_stream_cannot_be_paused(migrated: Path) -> None:
    """The relay reads tables: there is no position."""
    result = afluente("pause", "outbox_relay")

    assert result.exit_code == ExitCode.USAGE
    assert "reads no stream" in words(result.output)


def test_demo_refuses_a_folder_that_is_not_empty(place: Path) -> None:
    """It counts everything that is there."""
    (place / "something").touch()

    result = afluente("demo", "--folder", str(place))

    assert result.exit_code == ExitCode.BAD_SETTINGS
    assert "is not empty" in result.output
