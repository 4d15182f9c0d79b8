"""Addresses and secrets are taken out of text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.masking import mask, mask_value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("550 <ana.secret@example.com>: unknown", "550 <a***@e***>: unknown"),
        ("to:ana@example.com, bob@example.org", "to:a***@e***, b***@e***"),
        ("'ana@example.com'", "a***@e***"),
        ('"Ana Secret"@example.com refused', "A***@e*** refused"),
        ("bounce+ana=example.com@example.org", "b***@e***"),
        ("joão@exemplo.org", "j***@e***"),
        ("https://example.org/u?e=ana%40example.com", "https://***@example.com"),
        ("ana\uff20example.com", "a***@e***"),
        ("postgresql+asyncpg://u:hunter2@db:5432/a", "postgresql+asyncpg://***@db:5432/a"),
        ("Authorization: Bearer abc.def.ghi", "Authorization: Bearer ***"),
        ("AUTH PLAIN AGFuYQBodW50ZXIy", "AUTH PLAIN ***"),
        ("password=hunter2 user=x", "password=*** user=x"),
        ('{"smtp_password": "hunter 2", "port": 25}', '{"smtp_password": ***, "port": 25}'),
        ("a decorator @fixture, 5 @ 3, a@", "a decorator @fixture, 5 @ 3, a@"),
        ("nothing to hide", "nothing to hide"),
    ],
)
def test_address_or_secret_is_masked_wherever_it_stands(text: str, expected: str) -> None:
    """What is around it stays readable."""
    assert mask(text) == expected


atoms = st.text("abcdefgXYZ019.!#$%&'*+/=?^_`{|}~-áß", min_size=3, max_size=30).filter(lambda t: t[0].isalnum())
around = st.text("ab <>()[]{},;:\"'=\\/\n\t%", max_size=20)


@given(
    before=around, local=atoms, domain=st.from_regex(r"[a-z]{3,10}(\.[a-z]{3,10}){1,3}", fullmatch=True), after=around
)
def test_neither_part_of_an_address_survives_whatever_is_around(
    before: str, local: str, domain: str, after: str
) -> None:
    """The domain may name a person as well as the local part."""
    masked = mask(f"{before}{local}@{domain}{after}")
    assert f"@{domain}" not in masked
    assert f"{local}@" not in masked


def test_nested_values_are_masked_and_personal_fields_removed() -> None:
    """A structure is followed; what a field's name calls personal is not even masked."""
    value = {
        "row_id": 7,
        "errors": [ValueError("no ana@example.com"), {"agent_name": "Ana Secret", "To": "x"}],
        "ok": None,
        "raw": b"ana",
    }
    assert mask_value(value) == {
        "row_id": 7,
        "errors": ["ValueError: no a***@e***", {"agent_name": "[removed]", "To": "[removed]"}],
        "ok": None,
        "raw": "<3 bytes>",
    }


def test_value_that_contains_itself_is_cut_off() -> None:
    """Logging never recurses for ever."""
    value: list[object] = []
    value.append(value)
    assert "[removed]" in str(mask_value(value))
