"""What every publisher checks before it sends the first message of a call."""

from collections.abc import Sequence
from itertools import pairwise

from streams.log import MAX_MESSAGE_BYTES


def check_call(messages: Sequence[bytes], ids: Sequence[int] | None, named: bool) -> None:
    """ValueError when a message is too large, or when a named publisher's ids are missing, too few or do not rise."""
    largest = max(map(len, messages), default=0)
    if largest > MAX_MESSAGE_BYTES:
        raise ValueError(f"A message of {largest} bytes is above the limit of {MAX_MESSAGE_BYTES}; nothing was sent.")
    if not named:
        return
    if ids is None or len(ids) != len(messages):
        raise ValueError("A publisher with a name needs one id per message; nothing was sent.")
    if any(second <= first for first, second in pairwise(ids)):
        raise ValueError("Publishing ids must rise strictly, or messages would be dropped as known; nothing was sent.")
