"""Our documents as tests read them: headings, code blocks, links. Only the Markdown that we write ourselves."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block, its language, and the heading that it stands under."""

    heading: str
    language: str
    text: str


def blocks(path: Path, language: str) -> Iterator[Block]:
    """The fenced blocks of one language, in order."""
    text = path.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        if found[1] == language:
            before = _HEADING.findall(_FENCE.sub("", text[: found.start()]))
            yield Block(before[-1] if before else "", language, found[2])


def statements(path: Path) -> list[tuple[str, str]]:
    """Heading and text of every SQL statement."""
    return [
        (block.heading, statement.strip())
        for block in blocks(path, "sql")
        for statement in block.text.split(";\n")
        if statement.strip()
    ]


def prose(path: Path) -> str:
    """The text without its fenced blocks."""
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """What a link to a heading may say behind its #."""
    slugs = (re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(prose(path)))
    return set(slugs)
