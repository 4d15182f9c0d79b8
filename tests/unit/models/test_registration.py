"""What is a registration and what is not: nothing is repaired, and no refusal tells whom it was about."""

from typing import Any

import pytest
from email_validator import SPECIAL_USE_DOMAIN_NAMES, EmailNotValidError, validate_email
from hypothesis import example, given
from hypothesis import strategies as st
from orjson import loads

from models.keys import normalise_address
from models.registration import (
    _PLAIN_ADDRESS,
    MAILABLE,
    MAX_LENGTH,
    REASONS,
    InvalidRegistration,
    Registration,
    parse_registration,
    recipient_body,
)

ITEM: dict[str, Any] = {
    "registration": 154069287,
    "opp_id": 7301,
    "opp_name": "Edital de teste",
    "number": "on-154026963",
    "agent_name": "Ana Exemplo",
    "agent_email": "ana@example.com",
}
TEXTS = ("opp_name", "number", "agent_name", "agent_email")


def reason_of(item: object) -> tuple[str, str | None]:
    """The reason and field for which the item is refused; fails when it is taken."""
    with pytest.raises(InvalidRegistration) as caught:
        parse_registration(item)
    assert caught.value.reason in REASONS
    assert REASONS[caught.value.reason] in str(caught.value)
    return caught.value.reason, caught.value.field


def test_the_publishers_example_is_taken_as_it_is() -> None:
    """The message of the contract, field by field."""
    assert parse_registration(ITEM) == Registration(
        154069287, 7301, "Edital de teste", "on-154026963", "Ana Exemplo", "ana@example.com"
    )


def test_ids_are_the_same_when_they_come_as_digits() -> None:
    """42 and "42" make one registration and one key."""
    as_text = parse_registration({**ITEM, "registration": "154069287", "opp_id": "7301"})
    assert as_text == parse_registration(ITEM)
    assert as_text.key == parse_registration(ITEM).key


def test_other_keys_are_ignored_when_the_publisher_adds_some() -> None:
    """An addition to the message is no reason to lose it."""
    assert parse_registration({**ITEM, "agent_phone": None, "big": 1.5e300}) == parse_registration(ITEM)


@pytest.mark.parametrize("field", ITEM)
def test_a_registration_is_refused_when_a_key_is_missing_or_null(field: str) -> None:
    """All six are required, and null is no value."""
    assert reason_of({name: value for name, value in ITEM.items() if name != field}) == ("missing", field)
    assert reason_of({**ITEM, field: None}) == ("bad_id" if field in ("registration", "opp_id") else "not_text", field)
    assert reason_of({**ITEM, field: {}})[1] == field


@pytest.mark.parametrize("item", [None, 1, "x", [], [ITEM], True], ids=repr)
def test_an_item_is_refused_when_it_is_no_object(item: object) -> None:
    """Lists hold whatever their writer put in."""
    assert reason_of(item) == ("not_an_object", None)


@pytest.mark.parametrize(
    "value", ["042", "42 ", " 42", "４２", "-1", "", "e\u0301-1", 42.0, -1, True, 2.0**64, 10**19], ids=ascii
)
def test_a_registration_is_refused_when_an_id_only_looks_like_one(value: object) -> None:
    """Also an integer beyond 64 bits, which the parser has turned into a float: never altered in silence."""
    assert reason_of({**ITEM, "registration": value}) == ("bad_id", "registration")
    assert reason_of({**ITEM, "opp_id": value}) == ("bad_id", "opp_id")


@pytest.mark.parametrize("field", TEXTS)
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (7, "not_text"),
        ("", "blank"),
        (" \u00a0", "blank"),
        ("a\nb", "control_character"),
        ("a\r\nRCPT TO:<eve@example.com>", "control_character"),
        ("a\x00", "control_character"),
        ("a\x85b", "control_character"),
        ("a\u2028b", "control_character"),
        ("a\x7fb", "control_character"),
        ("a\ud800b", "lone_surrogate"),
    ],
    ids=ascii,
)
def test_a_registration_is_refused_when_a_text_could_break_a_header(field: str, value: object, reason: str) -> None:
    """Names and titles stand in subjects and address headers."""
    assert reason_of({**ITEM, field: value}) == (reason, field)


@pytest.mark.parametrize("field", TEXTS)
def test_a_text_is_refused_when_it_is_longer_than_its_limit(field: str) -> None:
    """At the limit it is taken, one more is too many."""
    fill = "x" if field != "agent_email" else ""
    assert reason_of({**ITEM, field: "x" * (MAX_LENGTH[field] + 1)}) == ("too_long", field)
    if fill:
        assert parse_registration({**ITEM, field: fill * MAX_LENGTH[field]})


@pytest.mark.parametrize(
    "name",
    ["Davis, Sam (Jr.)", "Æsa Ødegård 🎉" * 15, "👩\u200d🎨", "Ana\u00a0Exemplo", "<script>", "Zoe\u0308", "' OR 1=1"],
)
def test_a_name_is_taken_unchanged_when_it_is_unusual(name: str) -> None:
    """Commas, emoji, joined emoji, no-break spaces, either Unicode form: names are names."""
    assert parse_registration({**ITEM, "agent_name": name}).agent_name == name


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("sam@example.com\n", "control_character"),
        ("sam@example.com\r\nRCPT TO:<eve@example.com>", "control_character"),
        ("sam@example.com\x00", "control_character"),
        ("sam@example.com, eve@example.com", "address_not_one"),
        ("sam@example.com;eve@example.com", "address_not_one"),
        ("sam@example.com eve@example.com", "address_not_one"),
        ("sam@eve@example.com", "address_not_one"),
        ("Sam <sam@example.com>", "address_with_name"),
        ("<sam@example.com>", "address_with_name"),
        (" sam@example.com", "address_with_blank"),
        ("sam@example.com ", "address_with_blank"),
        ('"sam davis"@example.com', "address_with_blank"),
        ("sam@exam\u00a0ple.com", "address_with_blank"),
        ("sám@example.com", "address_needs_smtputf8"),
        ("\u212aim@example.com", "address_needs_smtputf8"),
        ("try..this@example.org", "address_invalid"),
        ("ana.@example.com", "address_invalid"),
        (".ana@example.com", "address_invalid"),
        ("ana@example..com", "address_invalid"),
        ("ana@example.com.", "address_invalid"),
        ("ana@-example.com", "address_invalid"),
        ("ana@example", "address_invalid"),
        ("ana@localhost", "address_invalid"),
        ("ana@mail.local", "address_invalid"),
        ("ana@192.0.2.1", "address_invalid"),
        ("ana@[192.0.2.1]", "address_invalid"),
        ('"ana"@example.com', "address_invalid"),
        ("ana(comment)@example.com", "address_invalid"),
        ("ana@exa_mple.com", "address_invalid"),
        ("ana@xn--zz.com", "address_invalid"),
        ("ana\uff20example.com", "address_invalid"),
        ("@example.com", "address_invalid"),
        ("ana@", "address_invalid"),
        ("ana", "address_invalid"),
        ("ana@" + "a" * 64 + ".com", "address_invalid"),
        ("ana@" + "a." * 125 + "com", "too_long"),
    ],
    ids=ascii,
)
def test_an_address_is_refused_with_its_reason_when_it_is_not_one_plain_mailbox(address: str, reason: str) -> None:
    """Injection, lists, display names, dots that some providers allow: refused, never repaired."""
    assert reason_of({**ITEM, "agent_email": address}) == (reason, "agent_email")


@pytest.mark.parametrize(
    "address",
    [
        "Ana.Silva+edital@Example.COM",
        "o'neil@example.com",
        "-a-@example.org",
        "ana@sub.example.test",
        "POSTMASTER@example.com",
        "a" * 65 + "@example.com",
    ],
)
def test_an_address_is_sent_to_unchanged_when_it_is_ascii(address: str) -> None:
    """Also its capitals: the receiving server may tell them apart."""
    assert parse_registration({**ITEM, "agent_email": address}).agent_email == address


def test_the_domain_is_written_in_ascii_when_it_has_other_letters() -> None:
    """Any server takes that form; the part before the @ stays as it is."""
    for domain in ("münchen.example", "MÜNCHEN.example", "mu\u0308nchen.example"):
        registration = parse_registration({**ITEM, "agent_email": f"Ana@{domain}"})
        assert registration.agent_email == "Ana@xn--mnchen-3ya.example"
        assert normalise_address(f"Ana@{domain}") == normalise_address(registration.agent_email)


LABEL = st.from_regex(r"[A-Za-z0-9-]{1,8}", fullmatch=True)
LIKELY = st.builds(
    "{}@{}.{}".format,
    st.from_regex(r"[A-Za-z0-9._+'-]{1,12}", fullmatch=True),
    st.lists(LABEL, min_size=1, max_size=4).map(".".join),
    st.sampled_from(["com", "br", "COM", "c0m", "x", "example", *SPECIAL_USE_DOMAIN_NAMES, "Local"]) | LABEL,
)


@given(LIKELY)
@example("a@" + "a" * 63 + ".com")
@example("a@ab--cd.com")
@example("a@xn--zz.com")
@example("ſam@example.com")
@example("a@e\u212aample.com")
@example("a@example.com\n")
def test_the_library_agrees_when_the_quick_pattern_takes_an_address(address: str) -> None:
    """Whatever takes the fast path is valid for email-validator too, and is the same mailbox there."""
    if _PLAIN_ADDRESS.fullmatch(address):
        judged = validate_email(address, check_deliverability=False, allow_smtputf8=False, test_environment=True)
        assert judged.ascii_email is not None
        assert judged.ascii_email.lower() == normalise_address(address)


@given(LIKELY)
def test_an_address_is_taken_exactly_when_the_library_takes_it(address: str) -> None:
    """The fast path and the named mistakes change no decision on plain addresses."""
    try:
        validate_email(address, check_deliverability=False, allow_smtputf8=False, test_environment=True)
    except EmailNotValidError:
        assert reason_of({**ITEM, "agent_email": address})[1] == "agent_email"
    else:
        assert parse_registration({**ITEM, "agent_email": address}).agent_email == address


def test_ordinary_addresses_take_the_fast_path() -> None:
    """Otherwise each costs as much as all the rest of its registration."""
    for address in ("ana@example.com", "Ana.Silva+x_1-2@mail.sub-domain.example.org", "user7@example.test"):
        assert _PLAIN_ADDRESS.fullmatch(address)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@given(
    ANYTHING
    | st.fixed_dictionaries({name: st.just(value) | ANYTHING for name, value in ITEM.items()})
    | st.builds(
        lambda address: {**ITEM, "agent_email": address}, st.text(max_size=30) | st.text().map("a@{}.com".format)
    )
)
def test_nothing_but_a_refusal_is_raised_when_an_item_is_arbitrary(item: object) -> None:
    """And what is taken always has a key and an ASCII address."""
    try:
        registration = parse_registration(item)
    except InvalidRegistration:
        return
    assert len(registration.key) == 64
    assert registration.agent_email.isascii()


@given(st.sampled_from(["agent_name", "agent_email", "number", "registration"]))
def test_the_reason_never_contains_the_value_when_a_registration_is_refused(field: str) -> None:
    """Reasons reach logs, tables and Sentry."""
    with pytest.raises(InvalidRegistration) as caught:
        parse_registration({**ITEM, field: "Secreta <secreta@example.com>\n"})
    assert "ecreta" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_the_body_for_the_mailer_parses_back_to_the_same_registration() -> None:
    """What the splitter writes is itself a valid registration, with its place in the batch."""
    registration = parse_registration({**ITEM, "opp_id": str(10**19 - 1), "agent_name": "Zoë \U0001f389"})
    body = loads(recipient_body(registration, "b" * 64, 3))
    assert parse_registration(body.pop("data")) == registration
    assert body == {"mailable": MAILABLE, "batch": "b" * 64, "index": 3}
