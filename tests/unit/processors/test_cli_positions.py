"""`replay`, `pause`, `resume`, `dead-letters`: which words they refuse, before anything is asked or changed."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from processors.__main__ import app
from streams.exit_codes import ExitCode
from tests.unit.processors.test_main import embedded, migrated, place, words

__all__ = ["embedded", "migrated", "place"]


def afluente(*arguments: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, arguments, prog_name="afluente")


REFUSED = {
    "no place": (["replay", "mailer"], "say one of --from-offset, --from-timestamp, --first and --next"),
    "two places": (["replay", "mailer", "--first", "--next"], "say one of"),
    "no time": (["replay", "mailer", "--from-timestamp", "yesterday"], "'yesterday' is not a time such as"),
    "no zone": (["replay", "mailer", "--from-timestamp", "2026-12-01T08:30"], "has no zone: add Z for UTC"),
    "negative": (["replay", "mailer", "--from-offset", "-1"], "should be greater than or equal to"),
    "unknown": (["replay", "maller", "--first"], "there is no processor 'maller'"),
    "no position": (["replay", "outbox_relay", "--first"], "reads no stream"),
    "all at once": (["pause", "all"], "reads no stream"),
    "resume": (["resume", "intake"], "reads no stream"),
    "nothing chosen": (["dead-letters", "redrive"], "say which: by --id"),
    "all and some": (["dead-letters", "redrive", "--all", "--reason", "x"], "say which: by --id"),
    "no age": (["dead-letters", "list", "--older", "2 weeks"], "'2 weeks' is not an age such as 90s"),
    "no batch": (["dead-letters", "list", "--batch", "%"], "up to 64 hexadecimal digits"),
    "no rate": (["dead-letters", "redrive", "--all", "--rate", "0"], "should be greater than or equal to"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_words_that_mean_nothing_are_refused_and_named(case: str, place: Path) -> None:
    """No settings are needed to be told: nothing was opened yet."""
    arguments, sentence = REFUSED[case]
    result = afluente(*arguments)

    assert result.exit_code == ExitCode.USAGE, result.output
    assert sentence in words(result.output)


def test_replay_says_that_there_is_no_stream_when_nothing_ever_ran(migrated: Path) -> None:
    """Not a position in something that does not exist."""
    result = afluente("replay", "mailer", "--next", "--yes")

    assert result.exit_code == ExitCode.LOG_REFUSED
    assert "recipients" in words(result.output)


def test_redrive_of_nothing_is_no_error(migrated: Path) -> None:
    """And needs no log."""
    result = afluente("dead-letters", "redrive", "--all")

    assert (result.exit_code, result.output) == (ExitCode.OK, "0 redriven\n")
    assert afluente("dead-letters", "list").output == "0 open\n"
    assert "mails that would follow: 0" in afluente("dead-letters", "redrive", "--all", "--dry-run").output
