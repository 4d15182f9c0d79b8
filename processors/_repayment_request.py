"""A request for a repayment, into its stream: used by the command line and by the operators' page.

Nothing outside is called and no row is written: what becomes of the request is the processor's business.
"""

import secrets

from models.outbox import TRACEPARENT
from models.repayment_requests import RepaymentRequest
from processors._settings import Settings
from streams.log import Log, StreamSpec
from streams.message import Message

TYPE = "repayment.request"
VERSION = 1


def requests_spec(settings: Settings) -> StreamSpec:
    """The stream with a message per repayment that is asked for."""
    s = settings
    return StreamSpec(
        s.repayment_requests_stream, 0, s.stream_max_age_seconds, s.stream_max_bytes, s.stream_segment_bytes
    )


async def publish_request(
    log: Log, settings: Settings, request: RepaymentRequest, traceparent: str | None = None
) -> str:
    """Write the request to its stream, made where it is missing, and wait for the confirm; answer its reference.

    `log` is open. To publish one again makes no second charge. Without a W3C `traceparent` a new trace begins here.
    Raises LogError and LogRefused; after a LogError it may be stored or not.
    """
    await log.declare(requests_spec(settings))
    [partition] = await log.partitions(settings.repayment_requests_stream)
    publisher = await log.publisher(partition)
    try:
        await publisher.publish([_message(request, traceparent).encode()])
    finally:
        await publisher.close()
    return request.reference


def new_trace() -> str:
    """A W3C traceparent of a trace that begins."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def _message(request: RepaymentRequest, traceparent: str | None) -> Message:
    context = traceparent if traceparent and TRACEPARENT.fullmatch(traceparent) else new_trace()
    return Message(request.reference, TYPE, VERSION, 1, request.to_json(), {"traceparent": context})
