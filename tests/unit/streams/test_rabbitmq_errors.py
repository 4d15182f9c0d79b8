"""rstream's errors in our words: which may pass, which need a person, and that none is without a text."""

import ssl

import pytest
from rstream import exceptions

from streams._rabbitmq_connection import translate
from streams.errors import LogError, LogRefused, StreamMissing, Unconfirmed


@pytest.mark.parametrize(
    "error",
    [
        exceptions.AuthenticationFailure(),
        exceptions.SASLAuthenticationFailureLoopback(),
        exceptions.VirtualHostAccessFailure(),
        exceptions.AccessRefused(),
        exceptions.PreconditionFailed(),
        ssl.SSLCertVerificationError("self-signed"),
    ],
)
def test_person_is_asked_for_when_trying_again_cannot_help(error: Exception) -> None:
    """Their texts are empty at the source, so the type is named."""
    translated = translate(error, "connecting")

    assert isinstance(translated, LogRefused)
    assert str(translated).startswith(f"connecting: {type(error).__name__}")


@pytest.mark.parametrize(
    "error",
    [
        exceptions.LeaderNotAvailable("Leader not yet elected"),
        exceptions.StreamNotAvailable(),
        exceptions.InternalError(),
        TimeoutError(),
        ConnectionResetError(),
        IndexError("list index out of range"),
        ssl.SSLError("record layer failure"),
    ],
)
def test_trying_again_is_advised_when_it_may_help(error: Exception) -> None:
    """All that is not known to be final: a broker that starts answers with any of these."""
    translated = translate(error, "connecting")

    assert isinstance(translated, LogError)
    assert type(error).__name__ in str(translated)


def test_missing_stream_is_told_apart() -> None:
    """Its reader may want to declare it."""
    assert isinstance(translate(exceptions.StreamDoesNotExist(), "reading"), StreamMissing)


def test_own_error_stays_as_it_is() -> None:
    """It has its text already."""
    error = Unconfirmed("2 of 3")

    assert translate(error, "publishing") is error
