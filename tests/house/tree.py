"""The files of the project as git knows them: committed or about to be, never what .gitignore leaves out."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def files(*patterns: str) -> list[Path]:
    """Existing files that match one of git's path patterns (all, if none is given)."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]
