"""What can go wrong with AMQP, in our words, and what pika's errors mean in them."""

from collections.abc import Iterator
from contextlib import contextmanager

from streams.errors import LogError, LogRefused


class AmqpLost(LogError):
    """The connection or channel is gone or does not answer; what is not acked comes again."""


class AmqpRefused(LogRefused):
    """The broker refuses for good: wrong password, no permission, other arguments than declared."""


class AmqpMissing(AmqpRefused):
    """There is no exchange or queue of that name."""


class Unroutable(AmqpLost):
    """A message came back: no queue takes it."""


# ---- pika's errors; it is imported where there is one, so that a process without AMQP need not hold it


def connection_errors() -> tuple[type[Exception], ...]:
    """All that says that a connection cannot be opened: pika's own, the system's, and the end of patience."""
    from pika import exceptions  # noqa: PLC0415
    from pika.adapters.utils.connection_workflow import AMQPConnectorException  # noqa: PLC0415

    return exceptions.AMQPError, AMQPConnectorException, OSError, TimeoutError


@contextmanager
def lost_on_error() -> Iterator[None]:
    """What pika raises when it is told to write on something that is closed."""
    from pika import exceptions  # noqa: PLC0415

    try:
        yield
    except (exceptions.AMQPConnectionError, exceptions.AMQPChannelError) as error:
        raise AmqpLost(f"the channel is closed: {text(error)}") from error


def loss(reason: BaseException) -> AmqpLost:
    """What has ended a channel, as our error; its cause is pika's."""
    lost = AmqpLost(text(reason))
    lost.__cause__ = reason
    return lost


_CODES = {403: AmqpRefused, 404: AmqpMissing, 405: AmqpRefused, 406: AmqpRefused, 530: AmqpRefused}
"""Reply codes of AMQP: access refused, not found, resource locked, precondition failed, not allowed."""


def refusal(error: BaseException) -> LogError | LogRefused:
    """What a request or a login that failed means: to be refused for good, or only lost.

    Only the broker's own word counts: a connection that is cut while it logs in looks like a wrong password to pika.
    """
    from pika import exceptions  # noqa: PLC0415

    no_login = (exceptions.ProbableAuthenticationError, exceptions.ProbableAccessDeniedError)
    errors = list(_chain(error))
    for inner in errors:
        if isinstance(inner, no_login) and exceptions.ConnectionClosedByBroker.__name__ in str(inner):
            return AmqpRefused(f"the broker lets nobody in: {inner}")
        if isinstance(inner, exceptions.ConnectionClosed | exceptions.ChannelClosed) and inner.reply_code in _CODES:
            return _CODES[inner.reply_code](text(inner))
    return AmqpLost(text(errors[-1]))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and all that pika has wrapped in it."""
    yield error
    for inner in (*error.args, *getattr(error, "exceptions", ()), getattr(error, "exception", None)):
        if isinstance(inner, BaseException):
            yield from _chain(inner)


def text(error: BaseException) -> str:
    """An error of pika in one line."""
    return getattr(error, "reply_text", "") or f"{type(error).__name__}: {error}".removesuffix(": ")
