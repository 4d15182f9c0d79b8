"""The environment, read once, typed."""

from pathlib import Path

import pytest

from processors._settings import Settings, load_settings
from streams.errors import BadSettings
from streams.recovery import OnUnknown
from tests.house.tree import ROOT

URLS = {"DATABASE_URL": "sqlite+aiosqlite:///var/a.db", "LOG_URL": "embedded:///var/log.db"}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a test sets is set."""
    for name in Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)


def load(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Settings:
    """The settings of an environment that holds both URLs and these."""
    for name, value in (URLS | variables).items():
        monkeypatch.setenv(name, value)
    return load_settings(env_file=None)


def test_defaults_are_legal_and_lease_is_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two URLs are enough for everything that sends no mail."""
    settings = load(monkeypatch)
    assert (settings.lease, settings.reply_timeout, settings.reserve, settings.in_doubt) == (120, 15, 45, 16)
    assert settings.backoff_seconds == (60, 300, 900)
    assert settings.on_unknown_outcome is OnUnknown.RESEND


def test_all_that_is_missing_or_wrong_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to start a pod once per mistake; and no value is shown, for it may be a password."""
    monkeypatch.setenv("LOG_URL", "amqp://user:hunter2@broker/")
    monkeypatch.setenv("SLOTS", "many")
    monkeypatch.setenv("BACKOFF_SECONDS", "60,soon")
    with pytest.raises(BadSettings) as caught:
        load_settings(env_file=None)
    text = str(caught.value)
    assert "DATABASE_URL is missing: " in text
    assert "LOG_URL is wrong: it must begin with rabbitmq-stream://" in text
    assert "SLOTS is wrong: " in text
    assert "BACKOFF_SECONDS is wrong: " in text
    assert "hunter2" not in text


def test_secrets_are_not_shown_when_settings_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings may end up in a log or a traceback."""
    settings = load(
        monkeypatch,
        DATABASE_URL="postgresql+asyncpg://u:hunter2@db/a",
        LOG_URL="rabbitmq-stream://u:hunter2@mq/",
        SMTP_PASSWORD="hunter2",
        SENTRY_DSN="https://hunter2@sentry.example.com/1",
    )
    assert "hunter2" not in repr(settings) + str(settings)
    assert settings.smtp_password is not None
    assert settings.smtp_password.get_secret_value() == "hunter2"


def test_short_times_are_legal_as_kill_tests_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply time-out shrinks with the act."""
    settings = load(monkeypatch, ACT_TIMEOUT_SECONDS="3", COMMIT_ALLOWANCE_SECONDS="1", CLOCK_STEP_SECONDS="1")
    assert (settings.lease, settings.reserve) == (5, 2.5)


@pytest.mark.parametrize(
    ("variables", "inequality"),
    [
        (
            {"LEASE_SECONDS": "119"},
            "LEASE_SECONDS >= ACT_TIMEOUT_SECONDS + COMMIT_ALLOWANCE_SECONDS + CLOCK_STEP_SECONDS does not hold: 119 <",
        ),
        (
            {"REPLY_TIMEOUT_SECONDS": "90"},
            "REPLY_TIMEOUT_SECONDS + COMMIT_ALLOWANCE_SECONDS < LEASE_SECONDS does not hold: 120 >= 120",
        ),
        ({"REPLY_TIMEOUT_SECONDS": "61"}, "REPLY_TIMEOUT_SECONDS <= ACT_TIMEOUT_SECONDS does not hold: 61 > 60"),
        (
            {"BREAKER_PROBE_SECONDS": "90"},
            "BREAKER_PROBE_SECONDS <= BREAKER_PROBE_MAX_SECONDS does not hold: 90 > 60",
        ),
        (
            {"STREAM_MAX_BYTES": "1000000", "STREAM_SEGMENT_BYTES": "1000001"},
            "STREAM_SEGMENT_BYTES <= STREAM_MAX_BYTES does not hold",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], inequality: str
) -> None:
    """The variables and the inequality, so that one can see which of them to change."""
    with pytest.raises(BadSettings) as caught:
        load(monkeypatch, **variables)
    assert inequality in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAIL_FROM", "a@example.com\nBcc: b@example.com"),
        ("MAIL_FROM", "a@example.com, b@example.com"),
        ("MAIL_FROM", "Ana <a@example.com>"),
        ("MAIL_FROM_NAME", "Cultura\r\nBcc: b@example.com"),
        ("MAIL_LIST_ID", "x\ny"),
        ("SMTP_SECURITY", "ssl"),
        ("SMTP_PORT", "70000"),
        ("SLOTS", "0"),
        ("ACT_TIMEOUT_SECONDS", "inf"),
        ("ACT_TIMEOUT_SECONDS", "nan"),
        ("BACKOFF_SECONDS", ","),
        ("BACKOFF_SECONDS", "0"),
        ("BACKOFF_JITTER", "-0.1"),
        ("MAIL_TEMPLATES", "/does/not/exist"),
        ("LOG_CA_FILE", "/does/not/exist.pem"),
        ("DATABASE_URL", "mysql://db/a"),
    ],
)
def test_value_is_refused_when_it_could_do_harm(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """Header injection, endless times and missing files are found at start."""
    with pytest.raises(BadSettings, match=f"{name} is wrong"):
        load(monkeypatch, **{name: value})


def test_mailer_names_all_that_it_needs_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only one processor needs is required only by that one."""
    settings = load(monkeypatch)
    with pytest.raises(BadSettings) as caught:
        settings.require("SMTP_HOST", "MAIL_FROM")
    assert "SMTP_HOST is missing" in str(caught.value)
    assert "MAIL_FROM is missing" in str(caught.value)


def test_required_settings_pass_when_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check answers the settings themselves."""
    settings = load(monkeypatch, SMTP_HOST="localhost", MAIL_FROM="a.b+c@example.com")
    assert settings.require("SMTP_HOST", "MAIL_FROM") is settings


def test_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifests and .env files write NAME= for what they leave alone."""
    settings = load(monkeypatch, SLOTS="", SMTP_HOST="", LEASE_SECONDS="")
    assert (settings.slots, settings.smtp_host, settings.lease_seconds) == (16, None, None)


def test_in_doubt_limit_never_exceeds_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process cannot have more in doubt than it has under way."""
    assert load(monkeypatch, SLOTS="4", IN_DOUBT_LIMIT="9").in_doubt == 4
    assert load(monkeypatch, SLOTS="4", IN_DOUBT_LIMIT="1").in_doubt == 1


def test_environment_goes_before_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file serves a laptop; a pod's environment decides."""
    file = tmp_path / ".env"
    file.write_text("".join(f"{k}={v}\n" for k, v in URLS.items()) + "SLOTS=3\nTURN_RECORDS=7\nSOMETHING_ELSE=1\n")
    monkeypatch.setenv("SLOTS", "4")
    settings = load_settings(env_file=file)
    assert (settings.slots, settings.turn_records) == (4, 7)


def test_example_file_is_legal_and_shows_the_defaults() -> None:
    """Whoever copies it gets what the code would do, but for the services and the sender."""
    example, defaults = load_settings(env_file=ROOT / ".env.example"), Settings.model_fields
    changed = {name for name in defaults if getattr(example, name) != defaults[name].default}
    services = {"new_checkout_api_url", "new_checkout_api_token"}
    services |= {"database_url", "log_url", "amqp_url", "management_url", "smtp_host", "smtp_username", "smtp_password"}
    assert changed == services | {"mail_from", "mail_from_name"}


def test_every_setting_says_what_it_is_for() -> None:
    """One line each; the example file and the error messages show it."""
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []
