"""Takes addresses and secrets out of text before it leaves the process. Pure.

It cannot know names, so nobody logs them. Rather too much is masked than too little: what merely looks like an address,
such as a Message-ID, is masked as well.
"""

import re
from collections.abc import Mapping, Set

REMOVED = "[removed]"

PERSONAL_KEYS = frozenset(
    {"address", "agent_email", "agent_name", "body", "content", "email", "name", "recipient", "subject", "to"}
    | {"authorization", "password", "secret", "token", "username"}
)
"""Fields whose values are personal or secret whatever they look like."""

DEPTH = 8
"""How deep values may be nested; what lies deeper is left out rather than followed."""

_AT = re.compile(r"@|\uff20|%40")

# One pass from left to right, each alternative linear: the credentials of a URL, a quoted local part with its domain,
# or a run of characters that an address could be made of. `=` belongs to it because of addresses within addresses
# (bounce+ana=example.com@example.org), the colon does not, so that `to:ana@example.com` keeps its `to:`.
_WORDS = re.compile(
    r"""(?P<credentials>://[^\s"<>]*(?:@|%40))"""
    r"""|(?P<quoted>"[^"\n]{1,200}"(?:@|\uff20)[^\s<>()\[\]",;:]+)"""
    r"""|[^\s<>()\[\]",;:]+"""
)
_SECRETS = re.compile(
    r"""(?P<scheme>\b(?:bearer|basic|auth[ ]plain|auth[ ]login)\s+)[^\s"',;]{6,}"""
    r"""|(?P<field>(?:password|passwd|pwd|secret|token|api[_-]?key|authorization)["']?\s*[:=]\s*)"""
    r"""(?!bearer\b|basic\b)(?:"[^"]*"|'[^']*'|[^\s"',;&]+)""",
    re.IGNORECASE,
)


def mask(text: str) -> str:
    """The text with every address as `a***@e***`, and what follows words such as Bearer or password= as `***`."""
    text = _SECRETS.sub(lambda found: f"{found['scheme'] or found['field']}***", text)
    return _WORDS.sub(_masked_word, text) if _AT.search(text) else text


def mask_value(value: object, depth: int = DEPTH) -> object:  # noqa: PLR0911 - one line per kind
    """The same for a value of any kind, and all that it contains; objects become their text, bytes their number."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if depth <= 0:
        return REMOVED
    if isinstance(value, Mapping):
        return {mask(str(k)): _masked_field(str(k), v, depth - 1) for k, v in value.items()}
    if isinstance(value, list | tuple | Set):
        return [mask_value(item, depth - 1) for item in value]
    return mask(f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else str(value))


def _masked_field(key: str, value: object, depth: int) -> object:
    return REMOVED if key.lower() in PERSONAL_KEYS and value is not None else mask_value(value, depth)


def _masked_word(found: re.Match[str]) -> str:
    if found["credentials"]:
        return "://***@"
    word = found[0]
    at = _AT.search(word)
    if at is None:
        return word
    local, domain = word[: at.start()], word[at.end() :]
    if not local or not domain:
        return word
    return f"{_first_letter(local)}***@{_first_letter(domain)}***"


def _first_letter(text: str) -> str:
    return next((character for character in text if character.isalnum()), "")
