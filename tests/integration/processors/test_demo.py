"""`afluente demo`, as `make demo` starts it: what it ends with, and what it leaves behind."""

import json
from pathlib import Path
from urllib.parse import quote

import pytest
from sqlalchemy import text

from streams.database import connect
from streams.exit_codes import ExitCode
from tests.support.command import Done, afluente

LAST_LINE = [
    "received",
    "sent",
    "failed",
    "rejected",
    "duplicates_in_batch",
    "suppressed_on_redelivery",
    "mails_at_sink",
    "mailed_twice",
]


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Where this test's temporary files go."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


def left_behind(folder: Path) -> list[str]:
    """What a demo left there."""
    return [path.name for path in folder.iterdir()]


async def test_demo_adds_up_and_leaves_nothing_behind(temporary: Path) -> None:
    """One line of JSON, the last one; every number of it fits the others; no terminal is needed."""
    done = await afluente({"TMPDIR": str(temporary)}, "demo")

    assert done.code == ExitCode.OK, done.err
    found = json.loads(done.out.splitlines()[-1])
    assert list(found) == LAST_LINE
    assert found["received"] == 1_000
    assert found["received"] == found["sent"] + found["failed"] + found["rejected"] + found["duplicates_in_batch"]
    assert found["mails_at_sink"] == found["sent"]
    assert found["suppressed_on_redelivery"] == found["sent"] + found["failed"]
    assert found["mailed_twice"] == 0
    assert min(found[name] for name in ("failed", "rejected", "duplicates_in_batch")) > 0
    assert not left_behind(temporary)


async def test_demo_shows_what_it_says_when_its_files_are_kept(tmp_path: Path) -> None:
    """Who is refused for ever used three attempts, who is refused once or twice was sent."""
    folder = tmp_path / "demo"
    done = await afluente({}, "demo", "--folder", str(folder))
    assert done.code == ExitCode.OK, done.err

    engine = connect(f"sqlite+aiosqlite:///{folder / 'demo.db'}", "test")
    async with engine.connect() as connection:
        rows = (await connection.execute(text('SELECT "to", status, attempts FROM email_dispatches'))).all()
    await engine.dispose()

    by_kind = {kind: {(r.status, r.attempts) for r in rows if r.to.startswith(kind)} for kind in KINDS}
    assert by_kind == {
        "pessoa": {("sent", 1)},
        "late-once": {("sent", 2)},
        "late-twice": {("sent", 3)},
        "never": {("failed", 3)},
    }


KINDS = ("pessoa", "late-once", "late-twice", "never")


async def test_demo_ignores_the_settings_of_the_environment(tmp_path: Path) -> None:
    """Who has a real mail server in the environment must not mail a thousand strangers by trying the demo."""
    environment = {
        "SMTP_HOST": "192.0.2.1",
        "DATABASE_URL": "postgresql+asyncpg://somebody@192.0.2.1/production",
        "LOG_URL": f"rabbitmq-stream://u:{quote('p/w')}@192.0.2.1:5552/",
        "MAX_ATTEMPTS": "1",
        "TMPDIR": str(tmp_path),
    }

    done: Done = await afluente(environment, "demo")

    assert done.code == ExitCode.OK, done.err
    assert json.loads(done.out.splitlines()[-1])["mails_at_sink"] > 0


async def test_demo_ends_with_an_error_and_keeps_its_files_when_the_numbers_disagree(tmp_path: Path) -> None:
    """A mail server that wrote one mail down twice: a sentence and the exit code say so; the line is still there."""
    done = await afluente({"TMPDIR": str(tmp_path), "PYTHONPATH": str(_meddler(tmp_path))}, "demo")

    assert done.code == ExitCode.FAILED
    assert "1 mails arrived more than once" in done.err
    assert "rows are sent, but the mail server has" in done.err
    assert json.loads(done.out.splitlines()[-1])["mailed_twice"] == 1
    assert any(name.startswith("afluente-demo-") for name in left_behind(tmp_path))


def _meddler(folder: Path) -> Path:
    """A folder whose sitecustomize makes the mail server's process write its first mail down twice.

    The product has no switch for it; this is how the mail server's own log comes to say something else than the rows.
    """
    place = folder / "meddler"
    place.mkdir()
    (place / "sitecustomize.py").write_text(
        "import json, sys\n"
        "if any(word.endswith('_demo.sink') for word in sys.orig_argv):\n"
        "    dumps, times = json.dumps, iter([2])\n"
        "    json.dumps = lambda mail, **how: '\\n'.join([dumps(mail, **how)] * next(times, 1))\n"
    )
    return place
