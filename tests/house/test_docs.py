"""What documents point to exists: files, headings, tests and settings by name."""

import re
from collections.abc import Iterator
from pathlib import Path

from processors._settings import Settings
from streams.exit_codes import ExitCode
from tests.house.tree import ROOT, files
from tests.support.documents import anchors, prose

_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_OURS = re.compile(r"(?:models|streams|processors|alembic|tests|scripts|bench|docs)/[\w./-]*")
_SETTING = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")

OTHERS = {
    "AFLUENTE_SERVICES",
    "AFLUENTE_DOCKER",
    "AFLUENTE_ARTEFACTS",
    "CLOCK_BOOTTIME",
    "CURRENT_TIMESTAMP",
    "SPLIT_VERSION",
    "SKIP_LOCKED",
}
OTHERS |= {"CREDIT_CARD"}
"""Words in capitals that are no settings: of the development services, the clock, SQL, the code, the gateway."""


def documents() -> list[Path]:
    """All documents that we write."""
    return files("*.md")


def links() -> Iterator[tuple[Path, str, Path, str]]:
    """Document, text, target file and anchor of every link within this project."""
    for document in documents():
        for text, target in _LINK.findall(prose(document)):
            if "://" not in target:
                path, _, anchor = target.partition("#")
                yield document, text, (document.parent / path).resolve() if path else document, anchor


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    """A reader at night follows links; one that leads nowhere costs minutes."""
    broken = [
        f"{document.relative_to(ROOT)}: {text}: {target.name}#{anchor}"
        for document, text, target, anchor in links()
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]
    assert not broken


def test_every_promise_is_linked_to_a_test_that_exists() -> None:
    """A promise whose test was renamed or removed is only a sentence."""
    missing = [
        f"{document.relative_to(ROOT)}: {text}"
        for document, text, target, _ in links()
        if (name := text.strip("`")).startswith("test_")
        and not re.search(rf"def {name}\(", target.read_text(encoding="utf-8"))
    ]
    assert not missing


def test_every_path_named_in_a_document_exists() -> None:
    """Files move; what tells about them has to move along."""
    missing = [
        f"{document.relative_to(ROOT)}: {code}"
        for document in documents()
        for code in _CODE.findall(prose(document))
        if _OURS.fullmatch(code) and not (ROOT / code).exists()
    ]
    assert not missing


def test_every_setting_named_in_a_document_exists() -> None:
    """A recipe with a setting that has another name by now does nothing, silently."""
    known = {name.upper() for name in Settings.model_fields} | {code.name for code in ExitCode} | OTHERS
    unknown = {
        f"{document.relative_to(ROOT)}: {word}"
        for document in documents()
        for code in _CODE.findall(prose(document))
        for word in _SETTING.findall(code)
        if code.startswith(word) and word not in known
    }
    assert not unknown


def test_every_document_is_in_the_index() -> None:
    """Who looks for a page finds it from docs/README.md; a picture stands on some page."""
    index = ROOT / "docs/README.md"
    linked = {target for document, _, target, _ in links() if document == index or target.suffix == ".png"}
    lost = [str(path.relative_to(ROOT)) for path in files("docs/*") if path != index and path not in linked]
    assert not lost


# ---- operating.md: what people look for at night

OPERATING = ROOT / "docs/operating.md"


def code() -> str:
    """All code of the application, as one text."""
    return "\n".join(
        path.read_text(encoding="utf-8") for path in files("models/*.py", "streams/*.py", "processors/*.py")
    )


def test_every_exit_code_is_explained_under_its_number() -> None:
    """It is all that a dead pod says."""
    rows = re.findall(r"^\| (\d+) \| (\w+) \|", prose(OPERATING), re.MULTILINE)
    assert [(int(number), name) for number, name in rows] == [(code.value, code.name.lower()) for code in ExitCode]


def test_every_metric_and_log_event_that_is_explained_exists() -> None:
    """An alert on a metric that nobody writes never comes."""
    text, source = prose(OPERATING), code()
    events = {event for event in re.findall(r"`([a-z]+\.[a-z_]+)`", text) if not event.endswith((".py", ".md"))}
    metrics = set(re.findall(r"`(afluente_\w+)`", text))
    assert len(events) > 15
    assert len(metrics) > 10
    assert not {name for name in events | metrics if f'"{name}"' not in source}


def test_every_reason_of_a_dead_letter_is_explained() -> None:
    """Whoever finds one in the table finds what to do about it here."""
    raised = re.findall(r'(?:Reject|InvalidImport|BadAddress)\(\s*"(\w+)"', code())
    laid = re.findall(r'_lay_to_rest\([^"]*"(\w+)"', code())
    named = {"attempts_used_up", "outcome_unknown", "invalid_registration", "too_large"}
    assert not {reason for reason in {*raised, *laid, *named} if f"`{reason}`" not in prose(OPERATING)}
