"""A re-split debt, told to the new checkout. Its contract: POST /v1/sync/repayments, bearer token, body = payload.

The receiver deduplicates on `repayment.reference` and answers a repeat with 200: that is success.
"""

from processors._http.request import RequestDescription
from processors._settings import Settings
from processors.sync.request import Dispatcher, required

PATH = "/v1/sync/repayments"


def describe(payload: str, settings: Settings) -> RequestDescription:
    """The request for one event."""
    url, token = required(settings, "NEW_CHECKOUT_API_URL", "NEW_CHECKOUT_API_TOKEN")
    secret = token.get_secret_value()
    return RequestDescription(
        method="POST",
        url=url.rstrip("/") + PATH,
        headers={"Authorization": f"Bearer {secret}", "Content-Type": "application/json"},
        body=payload.encode(),
        timeout=settings.outbox_timeout_seconds,
        secrets=(secret,),
    )


DISPATCHER = Dispatcher("new_checkout", describe)
