"""Names that live in several places are the same everywhere."""

import re

from processors._settings import Settings
from tests.house.tree import ROOT


def test_env_example_lists_exactly_the_settings_in_their_order() -> None:
    """Whoever copies the example sees every setting, where the code has it; a comment sign may switch one off."""
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    listed = [found[1] for line in lines if (found := re.match(r"#? ?([A-Z][A-Z0-9_]*)=", line))]
    assert listed == [name.upper() for name in Settings.model_fields]
