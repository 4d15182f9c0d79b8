"""The registry: one line here and one file beside it for each event name."""

from collections.abc import Mapping

from processors.sync.dispatchers import new_checkout_repayment_sync
from processors.sync.request import Dispatcher

DISPATCHERS: Mapping[str, Dispatcher] = {
    "new_checkout.repayment_sync": new_checkout_repayment_sync.DISPATCHER,
}
