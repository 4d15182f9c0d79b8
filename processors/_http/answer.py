"""What a request ends in. Apart from the sender, so that a process that sends none loads no HTTP client (12 MB)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back; `text` is the beginning of the body."""

    status: int
    text: str
    location: str | None = None
    retry_after: str | None = None


class SendFailed(Exception):
    """There is no answer. `fault` names a cause that all requests to this system share; `in_doubt`: it was sent."""

    def __init__(self, text: str, fault: str, in_doubt: bool) -> None:
        super().__init__(text)
        self.fault, self.in_doubt = fault, in_doubt
