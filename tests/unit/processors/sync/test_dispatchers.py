"""What each event asks for: a request as data."""

from typing import Any

import pytest

from processors._http.request import RequestDescription
from processors._settings import Settings
from processors.sync.dispatchers import DISPATCHERS
from processors.sync.request import NotConfigured

EVENT = "new_checkout.repayment_sync"
PAYLOAD = '{"repayment": {"reference": "r-1", "amount": 10.10}, "name": "Conceição"}'


def settings(**values: Any) -> Settings:
    """Settings with the new checkout's, unless a test says otherwise."""
    values = {"new_checkout_api_url": "https://checkout.example.com", "new_checkout_api_token": "s3cret"} | values
    values |= {"database_url": "sqlite+aiosqlite:///a.db", "log_url": "embedded:///log.db"}
    return Settings(_env_file=None, **values)


def describe(**values: Any) -> RequestDescription:
    """The request for the payload."""
    return DISPATCHERS[EVENT].describe(PAYLOAD, settings(**values))


def test_request_is_as_the_receivers_contract_has_it() -> None:
    """URL, bearer token, and the payload byte for byte, with its numbers as they are."""
    request = describe()
    assert (request.method, request.url) == ("POST", "https://checkout.example.com/v1/sync/repayments")
    assert request.headers == {"Authorization": "Bearer s3cret", "Content-Type": "application/json"}
    assert request.body == PAYLOAD.encode()
    assert request.timeout == 3.0
    assert [status for status in (199, 200, 201, 204, 299, 300, 302, 409, 500) if request.success(status)] == [
        200, 201, 204, 299,
    ]  # fmt: skip


@pytest.mark.parametrize("url", ["https://checkout.example.com/base", "https://checkout.example.com/base/"])
def test_path_follows_the_base_whether_or_not_it_ends_with_a_slash(url: str) -> None:
    """People write both."""
    assert describe(new_checkout_api_url=url).url == "https://checkout.example.com/base/v1/sync/repayments"


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        (("new_checkout_api_url",), "NEW_CHECKOUT_API_URL is not set"),
        (("new_checkout_api_token",), "NEW_CHECKOUT_API_TOKEN is not set"),
        (
            ("new_checkout_api_url", "new_checkout_api_token"),
            "NEW_CHECKOUT_API_URL and NEW_CHECKOUT_API_TOKEN are not set",
        ),
    ],
)
def test_error_names_the_settings_that_are_missing(missing: tuple[str, ...], sentence: str) -> None:
    """It is what the event's last_error will say."""
    with pytest.raises(NotConfigured, match=sentence):
        describe(**dict.fromkeys(missing))


def test_secrets_are_named_so_that_no_error_shows_them() -> None:
    """An answer may repeat the token."""
    assert describe().secrets == ("s3cret",)
