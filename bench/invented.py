"""Invented registrations, the same for the product and for its peer; imports nothing, for both environments use it."""


def registration(n: int) -> dict[str, object]:
    """Registration number `n`, as the publisher of imports sends it."""
    return {
        "registration": 154_000_000 + n,
        "opp_id": 7301,
        "opp_name": "Edital de Incentivo à Cultura 2026",
        "number": f"on-{154_000_000 + n}",
        "agent_name": f"Pessoa Exemplo {n}",
        "agent_email": address(n),
    }


def address(n: int) -> str:
    """To whom registration `n` is mailed."""
    return f"user{n}@example.com"
