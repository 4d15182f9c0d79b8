"""The demo's batch: 1,000 invented registrations, some of them invalid, repeated or hard to spell.

And what the mail server does to some of them. The same every time.
"""

from collections.abc import Callable, Mapping

import orjson

SIZE = 1_000

Item = dict[str, object]

NAMES = (
    "Ana Exemplo",
    "José da Conceição",
    "Souza, Maria",
    "Zoë Łukasiewicz-Núñez",
    "Antônio “Toninho” D'Ávila, Jr.",
    "Iracema 🌵 do Sertão",
    "李 小龙",
)

REFUSALS: tuple[Mapping[str, object], ...] = (
    {"at": "rcpt", "reply": "451 4.3.0 try again later", "recipient": "late-once-*", "times": 1},
    {"at": "dot", "reply": "451 4.3.0 try again later", "recipient": "late-twice-*", "times": 2},
    {"at": "rcpt", "reply": "550 5.1.1 no such mailbox", "recipient": "never-*"},
)
"""Rules for `sink.py`: who is refused once or twice, and who for ever."""

INVALID: tuple[Callable[[Item], object], ...] = (
    lambda item: {name: value for name, value in item.items() if name != "agent_email"},
    lambda item: item | {"agent_email": None},
    lambda item: item | {"agent_email": {}},
    lambda item: item | {"agent_email": "ana@example.com, bia@example.com"},
    lambda item: item | {"agent_email": "ana@example.com\r\nBcc: bia@example.com"},
    lambda item: item | {"agent_email": "josé@example.com"},
    lambda item: item | {"registration": "0154"},
    lambda item: item | {"opp_id": 7301.5},
    lambda item: item | {"agent_name": "   "},
    lambda item: [item["registration"]],
)
"""Ways in which a registration cannot be mailed; each is a dead letter of its own, and stops nobody else."""


def batch() -> bytes:
    """The whole list as JSON: 30 are invalid, about 40 repeated, 60 refused for a while and a dozen for ever."""
    items: list[object] = []
    for number in range(SIZE):
        item = _registration(number)
        if number % 33 == 32:
            items.append(INVALID[len(items) % len(INVALID)](item))
        elif number % 25 == 24:
            items.append(_again(_registration(number - 11), number))
        else:
            items.append(item)
    return orjson.dumps(items)


def _registration(number: int) -> Item:
    return {
        "registration": 154_000_000 + number,
        "opp_id": 7301,
        "opp_name": "Edital de Fomento às Artes nº 7",
        "number": f"on-{154_000_000 + number}",
        "agent_name": NAMES[number % len(NAMES)],
        "agent_email": f"{_mailbox(number)}@example.com",
    }


def _mailbox(number: int) -> str:
    for every, offset, kind in ((25, 3, "late-once"), (50, 7, "late-twice"), (66, 9, "never")):
        if number % every == offset:
            return f"{kind}-{number}"
    return f"pessoa-{number}"


def _again(item: Item, number: int) -> Item:
    """The same registration once more: byte for byte, with its id as text, or with the address in capitals."""
    ways: tuple[Item, ...] = (
        {},
        {"registration": str(item["registration"])},
        {"agent_email": str(item["agent_email"]).upper()},
    )
    return item | ways[number % len(ways)]
