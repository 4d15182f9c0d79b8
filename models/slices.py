"""The list of an import as bytes: read it strictly, and cut it at item borders into slices that fit a message.

Items are cut out as the bytes they are, never written anew: a number too large for this language is still the
publisher's number in the slice and in a dead letter.
"""

import re
from collections.abc import Iterator
from hashlib import sha256
from typing import NamedTuple

import orjson

from models.registration import OVERSIZE_KEY

MAX_SLICE_BYTES = 512 * 1024
"""Half of what a message may have: room for its properties, and a smaller step between two signs of life."""

MAX_ITEMS = 1 << 16
"""The most items of one record, whoever wrote it. The splitter's publishing ids depend on it: see STRIDE there."""


class InvalidImport(ValueError):
    """The bytes are not the list of an import: `reason` is a code, the text a sentence that quotes nothing of it."""

    def __init__(self, reason: str, error: str) -> None:
        super().__init__(error)
        self.reason = reason


class Slice(NamedTuple):
    """Consecutive items of an import: `items` of them from number `first` (from 0) of `total`, as a JSON array.

    `batch` is the same for all slices of one body. `oversize` lists (index, bytes) of items that were too large; each
    is replaced by a small object that the splitter refuses as too_large, so that it is counted and gets its dead
    letter.
    """

    body: bytes
    batch: str
    total: int
    first: int
    items: int
    oversize: tuple[tuple[int, int], ...] = ()

    def headers(self) -> dict[str, str | int]:
        """The properties that tell the splitter where in the import this slice belongs."""
        return {"batch": self.batch, "total": self.total, "first": self.first}


def batch_id(body: bytes) -> str:
    """The name of an import: the SHA-256 of its whole body, so that the same list sent twice is one batch."""
    return sha256(body).hexdigest()


# ---- reading


def parse_import(body: bytes) -> list[object]:
    """The items of an import. Raises `InvalidImport`: byte_order_mark, not_utf8, too_deep, not_json or not_an_array.

    Strict JSON in UTF-8: no NaN, no Infinity, no number that would become infinite (1e400), no half of a UTF-16 pair,
    no more than about a thousand levels. Integers beyond 64 bits become floats here, which no field of a registration
    accepts.
    """
    try:
        items = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _reason(body, error) from None  # its cause carries the whole body, which must not reach a log
    if not isinstance(items, list):
        raise InvalidImport("not_an_array", "the body is JSON but not an array")
    return items


def _reason(body: bytes, error: orjson.JSONDecodeError) -> InvalidImport:
    if body.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        return InvalidImport("byte_order_mark", "the body begins with a byte order mark (BOM), not with JSON")
    try:
        body.decode()
    except UnicodeDecodeError as wrong:
        return InvalidImport("not_utf8", f"the body is not UTF-8 at byte {wrong.start}")
    if "depth" in error.msg or "recursion" in error.msg:
        return InvalidImport("too_deep", "the body is nested too deeply")
    return InvalidImport("not_json", f"the body is not JSON: {error.msg} (line {error.lineno}, column {error.colno})")


# ---- cutting

_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_FLAT_ITEM = re.compile(
    rb'(?:[^"{}\[\],]++|%(string)b|\{(?:[^"{}\[\]]++|%(string)b)*+\})*+(?=[,\]])' % {b"string": _STRING}, re.DOTALL
)
_TO_BRACKET = re.compile(rb'(?:[^"{}\[\]]++|%(string)b)*+' % {b"string": _STRING}, re.DOTALL)


def cut_items(body: bytes) -> Iterator[bytes]:
    """The bytes of each item of a JSON array, in order, without the white space around it.

    Only for bodies that `parse_import` accepts: borders are searched, nothing is checked.
    """
    at = body.index(b"[") + 1
    while True:
        flat = _FLAT_ITEM.match(body, at)
        end = flat.end() if flat else _nested_end(body, at)
        item = body[at:end].strip()
        if item:
            yield item
        if body[end] == 0x5D:  # the array's own closing bracket
            return
        at = end + 1


def _nested_end(body: bytes, at: int) -> int:
    """The position of the comma or closing bracket after an item that holds arrays, or objects in objects."""
    depth = 0
    while True:
        at = _bracket(body, at)
        depth += 1 if body[at] in b"[{" else -1
        at += 1
        if depth == 0:
            while body[at] in b" \t\r\n":
                at += 1
            return at


def _bracket(body: bytes, at: int) -> int:
    """The position of the next bracket or brace that is not inside a string."""
    found = _TO_BRACKET.match(body, at)
    return found.end() if found else at


def slice_import(body: bytes, limit: int = MAX_SLICE_BYTES) -> Iterator[Slice]:
    """An import as slices of at most `limit` bytes and MAX_ITEMS items, in order; a small body is one slice, unchanged.

    Raises `InvalidImport` at once, before the first slice. An empty list is one slice of no items.
    """
    total = len(parse_import(body))
    batch = batch_id(body)
    if len(body) <= limit and total <= MAX_ITEMS:
        return iter((Slice(body, batch, total, 0, total),))
    return _slices(body, batch, total, limit)


def _slices(body: bytes, batch: str, total: int, limit: int) -> Iterator[Slice]:
    gathered: list[bytes] = []
    oversize: list[tuple[int, int]] = []
    first, size = 0, 2
    for index, item in enumerate(cut_items(body)):
        fits = len(item) + 2 <= limit
        piece = item if fits else b'{"%b":%d}' % (OVERSIZE_KEY.encode(), len(item))
        if gathered and (size + len(piece) > limit or len(gathered) == MAX_ITEMS):
            yield _slice(gathered, batch, total, first, oversize)
            gathered, oversize, first, size = [], [], index, 2
        gathered.append(piece)
        size += len(piece) + 1
        if not fits:
            oversize.append((index, len(item)))
    yield _slice(gathered, batch, total, first, oversize)


def _slice(items: list[bytes], batch: str, total: int, first: int, oversize: list[tuple[int, int]]) -> Slice:
    return Slice(b"[" + b",".join(items) + b"]", batch, total, first, len(items), tuple(oversize))
