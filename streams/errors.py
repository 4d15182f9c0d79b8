"""What can go wrong, one sentence each. The first three are the words in which a processor answers."""

from dataclasses import dataclass


class StreamsError(Exception):
    """Base of every error that the engine raises itself."""


# ---- the answers of a processor's act: done is a plain return, all else is one of these


@dataclass(eq=False)
class Retry(StreamsError):
    """Try this row again after its back-off.

    `fault` names a provider-wide cause (`connect`, `auth`, `tls`, ...), equal for all rows that fail alike; the
    breaker counts those. `in_doubt` says that the other side may have accepted: the reply was lost after the dot.
    `not_before` are the seconds for which the other side wants to be left alone: a back-off is never shorter.
    """

    error: str
    fault: str | None = None
    in_doubt: bool = False
    not_before: float = 0.0

    def __str__(self) -> str:
        return self.error


@dataclass(eq=False)
class Reject(StreamsError):
    """Never try this again: `reason` is a code for machines, `error` a sentence for people without personal data."""

    reason: str
    error: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.error}"


class LeaseOver(StreamsError):
    """The holder's lease may have passed: nothing may be sent and nothing is recorded for this claim."""


# ---- messages


class Undecodable(StreamsError):
    """The bytes of a record are not a message; the text says why and where."""


# ---- the log


class LogError(StreamsError):
    """The log could not do what was asked; trying again may help."""


class LogRefused(StreamsError):
    """The log refuses for good: wrong password, no permission, other arguments than declared. A person must act."""


class Unconfirmed(LogError):
    """Some messages of an unnamed publisher got no positive confirm; they may or may not be stored."""


class LogInUse(LogRefused):
    """Another process already runs processors on this embedded log file."""


class StreamMissing(LogRefused):
    """The stream or partition does not exist and was not asked to be created."""


# ---- the engine


class DatabaseAway(StreamsError):
    """The database did not answer, or answered that it cannot be written, for longer than allowed."""


class NotMigrated(StreamsError):
    """The database has not the tables that this release needs."""


class BadSettings(StreamsError):
    """Settings that contradict one another; the text names them and the inequality they break."""
