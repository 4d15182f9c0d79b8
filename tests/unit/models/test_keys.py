"""The rule of the idempotency key, as properties: which spellings are one e-mail, and which are none."""

import re
from hashlib import sha256

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from models.keys import MAX_ID_DIGITS, canonical_id, idempotency_key, normalise_address

IDS = st.integers(0, 10**MAX_ID_DIGITS - 1)
KIND = "import_registration"
NOT_IDS = [
    *(
        "042",
        "42 ",
        " 42",
        "+42",
        "-42",
        "4 2",
        "42\n",
        "4_2",
        "42.0",
        "0x2A",
        "00",
        "",
        "٤٢",
        "４２",
        "²",
        "\u00e9-1",
        "e\u0301-1",
    ),
    *(42.0, 4.2, -1, True, False, None, [42], {"id": 42}, b"42", 10**19, "9" * 20),
]


@given(IDS)
def test_an_id_is_the_same_when_it_is_a_number_or_its_digits(number: int) -> None:
    """42 and "42" are one id, and the canonical form is the number."""
    assert canonical_id(number) == canonical_id(str(number)) == number


@pytest.mark.parametrize("value", NOT_IDS, ids=ascii)
def test_an_id_is_refused_when_it_only_looks_like_a_number(value: object) -> None:
    """Nothing is trimmed, rounded or converted: a silent repair in one of several places would undo deduplication."""
    with pytest.raises(ValueError, match="digits"):
        canonical_id(value)


@given(st.text(max_size=22))
def test_a_text_is_an_id_only_when_python_writes_the_same_number_back(value: str) -> None:
    """No text has two readings."""
    try:
        number = canonical_id(value)
    except ValueError:
        assert not re.fullmatch("0|[1-9][0-9]{0,18}", value, re.ASCII)
    else:
        assert str(number) == value


@given(IDS, IDS)
def test_the_key_is_the_same_when_ids_come_as_text_and_the_address_in_capitals(opp: int, registration: int) -> None:
    """One person, one call, one mail, however the publisher spells it."""
    key = idempotency_key(KIND, opp, registration, "ana@example.com")
    assert key == idempotency_key(KIND, str(opp), str(registration), "Ana@EXAMPLE.com")


def test_the_key_is_the_hash_of_four_lines_when_another_language_computes_it() -> None:
    """The rule is a contract: a person with sha256sum gets the same."""
    lines = b"import_registration\n7301\n154069287\nana@example.com"
    assert idempotency_key(KIND, 7301, 154069287, "ana@example.com") == sha256(lines).hexdigest()


@given(st.tuples(IDS, IDS, st.sampled_from(["a@example.com", "b@example.com"])), st.data())
def test_the_keys_differ_when_any_part_differs(one: tuple[int, int, str], data: st.DataObject) -> None:
    """Also when the parts, written one after the other, would read the same."""
    other = data.draw(st.tuples(IDS, IDS, st.sampled_from(["a@example.com", "b@example.com"])))
    assume(one != other)
    assert idempotency_key(KIND, *one) != idempotency_key(KIND, *other)
    assert idempotency_key(KIND, *one) != idempotency_key("reminder", *one)


@pytest.mark.parametrize(
    ("address", "normal"),
    [
        ("Ana.Silva+x@Example.COM", "ana.silva+x@example.com"),
        ("ana@MÜNCHEN.example", "ana@xn--mnchen-3ya.example"),
        ("ana@xn--mnchen-3ya.example", "ana@xn--mnchen-3ya.example"),
        ("ana@münchen.example", "ana@xn--mnchen-3ya.example"),
        ("ana@faß.example", "ana@xn--fa-hia.example"),
    ],
)
def test_an_address_is_lower_case_with_an_ascii_domain_when_normalised(address: str, normal: str) -> None:
    """A domain in its own letters and in ASCII is the same mailbox."""
    assert normalise_address(address) == normal
    assert normalise_address(normal) == normal


@pytest.mark.parametrize(
    "address", ["", "ana", "@example.com", "ana@", "ána@example.com", "ana@ex..münchen", "\u212ana@a.com"]
)
def test_an_address_is_refused_when_it_has_no_normal_form(address: str) -> None:
    """Among them a letter that would become an ASCII k in lower case."""
    with pytest.raises(ValueError, match=r".+"):
        normalise_address(address)
