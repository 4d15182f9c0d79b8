"""What a process knows of revisions without alembic is what alembic knows."""

import subprocess
import sys

from alembic.script import ScriptDirectory

from processors._migrate import _config, revisions


def test_revisions_are_those_of_alembic_when_they_are_read_from_the_files() -> None:
    """A process that took an old database for a migrated one would fail at its first statement."""
    script = ScriptDirectory.from_config(_config())
    known = {each.revision for each in script.walk_revisions("base", "heads")}
    assert revisions() == (known, script.get_current_head())


def test_large_libraries_are_not_loaded_when_the_command_line_is() -> None:
    """Alembic and the HTTP client would cost each process, whatever it runs, 12 MB each; alembic each start 0.4 s."""
    large = {"alembic", "mako", "httpx", "aiohttp"}
    look = f"import sys, processors.__main__; print(sorted({large!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
