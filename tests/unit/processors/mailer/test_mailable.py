"""Templates become subject, text and HTML; what is wrong with them is named when they are loaded."""

from pathlib import Path

import pytest
from jinja2 import UndefinedError

from processors.mailer.mailable import BadMailable, load_mailable

KIND = "import_registration"
DATA = {
    "registration": 154069287,
    "opp_id": 7301,
    "opp_name": "Edital de teste",
    "number": "on-154026963",
    "agent_name": "Ana Exemplo",
    "agent_email": "ana@example.com",
}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of templates of one's own, all of them fine."""
    folder = tmp_path / KIND
    folder.mkdir()
    (folder / "subject.txt").write_text("Oi {{ agent_name }}\n", "utf-8")
    (folder / "body.txt").write_text("Texto {{ number }}\n", "utf-8")
    (folder / "body.html").write_text("<p>{{ number }}</p>\n", "utf-8")
    return tmp_path


def test_all_parts_name_person_and_registration_when_our_own_templates_are_rendered() -> None:
    """The recipient can tell from either part what the mail is about."""
    subject, text, html = load_mailable(KIND).render(DATA)
    assert "on-154026963" in subject
    assert "Edital de teste" in subject
    for part in (text, html):
        assert "Ana Exemplo" in part
        assert "on-154026963" in part
        assert "154069287" in part


def test_html_is_escaped_and_text_is_not_when_a_name_holds_markup() -> None:
    """A name is data: it cannot become a tag in the HTML, and stays readable in the text."""
    _, text, html = load_mailable(KIND).render(DATA | {"agent_name": '<script>alert("1")</script> & Cia'})
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert '<script>alert("1")</script> & Cia' in text


def test_subject_is_one_line_when_data_holds_line_breaks() -> None:
    """Nobody can add a header through the name of an edital."""
    subject = load_mailable(KIND).render(DATA | {"opp_name": "Edital\r\nBcc: eve@example.com\n\n 2"}).subject
    assert subject.endswith("Edital Bcc: eve@example.com 2")
    assert len(subject.splitlines()) == 1


def test_own_folder_replaces_our_templates_when_it_is_given(own: Path) -> None:
    """An office may write its own words without touching the code."""
    rendered = load_mailable(KIND, own).render(DATA)
    assert rendered == ("Oi Ana Exemplo", "Texto on-154026963\n", "<p>on-154026963</p>\n")


def test_own_layout_can_be_extended_when_it_lies_in_the_folder(own: Path) -> None:
    """Several kinds may share a frame."""
    (own / "layout.html").write_text("<main>{% block body %}{% endblock %}</main>", "utf-8")
    (own / KIND / "body.html").write_text(
        "{% extends 'layout.html' %}{% block body %}{{ agent_name }}{% endblock %}", "utf-8"
    )
    assert load_mailable(KIND, own).render(DATA | {"agent_name": "<b>"}).html == "<main>&lt;b&gt;</main>"


@pytest.mark.parametrize("name", ["subject.txt", "body.txt", "body.html"])
def test_file_is_named_at_load_when_it_is_missing(own: Path, name: str) -> None:
    """The person who starts the mailer learns it, not the first recipient."""
    (own / KIND / name).unlink()
    with pytest.raises(BadMailable, match=name):
        load_mailable(KIND, own)


def test_unknown_variable_is_named_at_load_even_when_a_branch_hides_it(own: Path) -> None:
    """A trial with one example would not see what only some recipients would meet."""
    (own / KIND / "body.txt").write_text("{% if opp_id == 1 %}{{ agent_nome }}{% endif %}", "utf-8")
    with pytest.raises(BadMailable, match=r"body\.txt: unknown variable agent_nome; known: .*agent_name"):
        load_mailable(KIND, own)


@pytest.mark.parametrize("source", ["{{ agent_name", "{{ agent_name|nope }}", "{{ opp_id.x.y }}", "{% include 'no' %}"])
def test_kind_and_cause_are_named_at_load_when_a_template_is_broken(own: Path, source: str) -> None:
    """Syntax, filters and attributes are tried before anybody is mailed."""
    (own / KIND / "body.html").write_text(source, "utf-8")
    with pytest.raises(BadMailable, match=KIND):
        load_mailable(KIND, own)


def test_empty_subject_is_refused_at_load(own: Path) -> None:
    """A mail without subject is a mistake of the template."""
    (own / KIND / "subject.txt").write_text(" \n", "utf-8")
    with pytest.raises(BadMailable, match="subject is empty"):
        load_mailable(KIND, own)


def test_kind_is_named_at_load_when_it_is_unknown() -> None:
    """There are exactly the kinds that have a folder."""
    with pytest.raises(BadMailable, match="no_such_kind"):
        load_mailable("no_such_kind")


def test_variable_is_named_when_the_data_of_a_recipient_lacks_it() -> None:
    """Nobody gets a mail with a hole where the number should be."""
    with pytest.raises(UndefinedError, match="number"):
        load_mailable(KIND).render({name: value for name, value in DATA.items() if name != "number"})
