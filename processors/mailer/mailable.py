"""A kind of e-mail: its subject, text and HTML, made from templates that are checked when they are loaded.

Not here: the bytes of a mail (`mail.py`), and who gets one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template, TemplateError, select_autoescape
from jinja2.meta import find_undeclared_variables

from streams.errors import BadSettings

BUILT_IN = Path(__file__).parent / "mailables"
_FILES = ("subject.txt", "body.txt", "body.html")


class BadMailable(BadSettings):
    """A kind of e-mail whose templates are missing or cannot be rendered; the text names the file and the cause."""


class Rendered(NamedTuple):
    """What the recipient reads. The subject is one line; the HTML is escaped."""

    subject: str
    text: str
    html: str


@dataclass(frozen=True, slots=True)
class Mailable:
    """The three templates of one kind."""

    kind: str
    _subject: Template
    _text: Template
    _html: Template

    def render(self, data: Mapping[str, object]) -> Rendered:
        """Fill the templates. A variable that `data` lacks raises jinja2.UndefinedError, which names it."""
        values = dict(data)
        subject = " ".join(_fill(self._subject, values).split())
        return Rendered(subject, _fill(self._text, values), _fill(self._html, values))


def _fill(template: Template, values: dict[str, object]) -> str:
    """As `template.render(values)`, which copies the values twice: a third of its time."""
    return "".join(template.root_render_func(template.new_context(values, shared=True)))


def load_mailable(kind: str, folder: Path | None = None) -> Mailable:
    """Load `<folder>/<kind>/`, by default from the templates that come with the application.

    Raises BadMailable when a file is missing, has an error, or uses a variable that this kind does not have. A folder
    of one's own replaces all three templates; the variables stay those of the kind's `sample.json`.
    """
    folder = folder or BUILT_IN
    sample = _sample(kind, folder)
    environment = _environment(folder)
    mailable = Mailable(kind, *(_template(environment, f"{kind}/{name}", sample) for name in _FILES))
    _try(mailable, sample)
    return mailable


def _sample(kind: str, folder: Path) -> dict[str, object]:
    """The variables of a kind with an invented value each: ours, or for a kind we do not know the folder's own."""
    for path in (BUILT_IN / kind / "sample.json", folder / kind / "sample.json"):
        if path.is_file():
            sample: dict[str, object] = json.loads(path.read_text("utf-8"))
            return sample
    raise BadMailable(f"no such mailable: {kind!r} (looked for {folder / kind / 'sample.json'})")


def _environment(folder: Path) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        auto_reload=False,
        keep_trailing_newline=True,
    )
    # Jinja copies the globals (range, lipsum, ...) into the context of every render, which doubles its cost.
    environment.globals.clear()
    return environment


def _template(environment: Environment, name: str, sample: Mapping[str, object]) -> Template:
    """Compile one file. Unknown variables are looked for in the source, so that no branch can hide one."""
    try:
        source, path, _ = environment.loader.get_source(environment, name)  # type: ignore[union-attr]
        unknown = find_undeclared_variables(environment.parse(source)) - set(sample)
        template = environment.get_template(name)
        template.globals = {}  # none, as above; in place of a chain of two that every render would look through
    except TemplateError as error:
        raise BadMailable(f"mail template {name}: {type(error).__name__}: {error}") from error
    if unknown:
        names, known = ", ".join(sorted(unknown)), ", ".join(sample)
        raise BadMailable(f"mail template {path}: unknown variable {names}; known: {known}")
    return template


def _try(mailable: Mailable, sample: Mapping[str, object]) -> None:
    try:
        rendered = mailable.render(sample)
    except Exception as error:  # a template can raise anything: a filter's TypeError, a missing include
        raise BadMailable(f"mail templates of {mailable.kind}: {type(error).__name__}: {error}") from error
    if not rendered.subject:
        raise BadMailable(f"mail template {mailable.kind}/subject.txt: the subject is empty")
