"""The schema that publishers test against says the same as the code that takes their messages."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.registration import MAX_LENGTH, InvalidRegistration, Registration, parse_registration

SCHEMA: dict[str, Any] = json.loads(Path(__file__).parents[3].joinpath("docs/schemas/import.schema.json").read_text())
ITEM: dict[str, Any] = SCHEMA["definitions"]["registration"]["examples"][0]
TYPES = {"array": list, "object": dict, "string": str, "integer": int}
SAID_TO_PEOPLE = {"$schema", "title", "description", "definitions", "examples"}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether the value fits; a keyword that is not in the table below raises KeyError, so that none is forgotten."""
    return all(KEYWORDS[name](rule, value) for name, rule in schema.items() if name not in SAID_TO_PEOPLE)


def _of(kind: type | tuple[type, ...], judge: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """As JSON Schema has it: a keyword judges values of its kind and lets all others pass."""
    return lambda rule, value: not isinstance(value, kind) or judge(rule, value)


KEYWORDS: dict[str, Callable[[Any, Any], bool]] = {
    "type": lambda rule, value: isinstance(value, TYPES[rule]) and not isinstance(value, bool),
    "$ref": lambda rule, value: fits(value, SCHEMA["definitions"][rule.removeprefix("#/definitions/")]),
    "allOf": lambda rule, value: all(fits(value, one) for one in rule),
    "anyOf": lambda rule, value: any(fits(value, one) for one in rule),
    "not": lambda rule, value: not fits(value, rule),
    "items": _of(list, lambda rule, value: all(fits(one, rule) for one in value)),
    "maxItems": _of(list, lambda rule, value: len(value) <= rule),
    "required": _of(dict, lambda rule, value: all(key in value for key in rule)),
    "properties": _of(dict, lambda rule, value: all(fits(value[key], rule[key]) for key in rule if key in value)),
    "pattern": _of(str, lambda rule, value: re.search(rule, value) is not None),
    "maxLength": _of(str, lambda rule, value: len(value) <= rule),
    "minimum": _of((int, float), lambda rule, value: value >= rule),
    "maximum": _of((int, float), lambda rule, value: value <= rule),
}


def taken(item: object) -> bool:
    """Whether the code takes the item."""
    try:
        parse_registration(item)
    except InvalidRegistration:
        return False
    return True


BAD: list[Any] = [
    *({name: value for name, value in ITEM.items() if name != left_out} for left_out in ITEM),
    *({**ITEM, name: None} for name in ITEM),
    *(
        {**ITEM, "registration": value}
        for value in ("042", "42 ", "42\n", "４２", "", "-1", -1, 4.2, True, 10**19, "9" * 20)
    ),
    *({**ITEM, name: value} for name in MAX_LENGTH for value in (7, "", " ", "a\nb", "a\x00", "a\u2028b", "x" * 1_001)),
    *(
        {**ITEM, "agent_email": value}
        for value in (
            *(
                "ana@example.com\n",
                "a@example.com,b@example.com",
                "a@b@example.com",
                "Ana <ana@example.com>",
                "ána@example.com",
            ),
            *(
                "try..this@example.org",
                "ana.@example.com",
                "ana@example..com",
                "ana@example.com.",
                "ana",
                "ana@example",
                "a b@c.org",
            ),
        )
    ),
    *(None, 1, "x", [], {}),
]
GOOD: list[Any] = [
    ITEM,
    {**ITEM, "more": None},
    {**ITEM, "registration": "42", "opp_id": 0},
    {**ITEM, "registration": 10**19 - 1, "opp_id": "9" * 19},
    *({**ITEM, name: "x" * MAX_LENGTH[name]} for name in ("opp_name", "number", "agent_name")),
    *({**ITEM, "agent_name": name} for name in ("Davis, Sam (Jr.)", "👩\u200d🎨", "a\u00a0b")),
    *(
        {**ITEM, "agent_email": value}
        for value in ("o'neil+x@sub.example.org", "ana@münchen.example", "ana@example。com")
    ),
]


@pytest.mark.parametrize("item", BAD, ids=lambda item: ascii(item)[:60])
def test_schema_and_code_refuse_alike_when_an_item_is_bad(item: object) -> None:
    """A publisher's test fails where our splitter would reject."""
    assert not taken(item)
    assert not fits([item], SCHEMA)


@pytest.mark.parametrize("item", GOOD, ids=lambda item: ascii(item)[:60])
def test_schema_and_code_agree_when_an_item_is_good(item: object) -> None:
    """A publisher's test passes where our splitter takes it."""
    assert taken(item)
    assert fits([ITEM, item], SCHEMA)


VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.sampled_from(["a.b@c.org", "42", "Ana"])


@given(st.fixed_dictionaries({name: st.just(value) | VALUES for name, value in ITEM.items()}))
def test_the_schema_never_refuses_when_the_code_takes_an_item(item: dict[str, object]) -> None:
    """The other way round it is coarser on addresses, as it says itself."""
    assert fits([item], SCHEMA) or not taken(item)


def test_the_schema_names_the_same_fields_and_limits_as_the_code() -> None:
    """One changes with the other."""
    properties = SCHEMA["definitions"]["registration"]["properties"]
    assert list(properties) == list(Registration._fields) == SCHEMA["definitions"]["registration"]["required"]
    limits = {name: properties[name]["allOf"][1]["maxLength"] for name in ("opp_name", "number", "agent_name")}
    limits["agent_email"] = SCHEMA["definitions"]["address"]["allOf"][1]["maxLength"]
    assert limits == MAX_LENGTH


def test_the_empty_import_fits_and_an_object_does_not() -> None:
    """The body is the array itself."""
    assert fits([], SCHEMA)
    assert not fits(ITEM, SCHEMA)
