"""A line of the log for each request: what it was, how large, where its time went, and how it ended.

Nothing of a request's content is logged, and nothing that its caller sent but its identifiers.
"""

import logging
from collections.abc import Iterator
from enum import StrEnum

from attention_serving.server.records import CallRecord, RequestRecord

log = logging.getLogger("attention_serving.server.requests")


class LoggedRequests(StrEnum):
    """Which requests have a line."""

    ALL = "all"
    FAILED = "failed"
    NONE = "none"


class RequestLog:
    """Writes the lines, whatever the level of the log is.

    Attributes:
        failed_only: Whether requests that ended with OK have no line.
    """

    def __init__(self, *, failed_only: bool) -> None:
        """Sets the level of the lines' logger.

        Args:
            failed_only: Whether requests that ended with OK have no line.
        """
        self.failed_only = failed_only
        log.setLevel(logging.INFO)

    def ended(self, call: CallRecord, request: RequestRecord | None) -> None:
        """A request of a stream, or a call, has ended."""
        is_message = call.is_stream and request is not None
        code = request.code if is_message and request is not None else call.code
        if self.failed_only and code == "OK":
            return
        event = "request" if is_message or not call.is_stream else "stream"
        log.info(event, extra=fields(call, request))


def fields(call: CallRecord, request: RequestRecord | None) -> dict[str, object]:
    """The fields of a line, without those that nothing is known of.

    Args:
        call: The call.
        request: The request; None at the end of a stream, and if it never arrived.
    """
    found: dict[str, object] = {
        "request_id": call.request_id,
        "method": call.method,
        "caller": call.caller,
        "trace_id": call.trace.trace_id.hex() if call.trace is not None else "",
    }
    if request is None:
        found |= {"requests": call.requests} if call.is_stream else {}
        found |= {"bytes_in": call.received_bytes, "bytes_out": call.sent_bytes}
    else:
        found |= {"model": request.model, "version": request.version}
        found |= {"sequences": request.sequences or "", "rows": request.rows or ""}
        found |= {"bytes_in": request.received_bytes, "bytes_out": request.sent_bytes}
        found |= {f"{stage}_ms": _milliseconds(seconds) for stage, seconds in stages(request)}
    ended = request if call.is_stream and request is not None else call
    started = request.received_at if call.is_stream and request is not None else call.arrived_at
    found |= {"total_ms": _milliseconds(ended.ended_at - started)}
    found |= {"code": ended.code, "reason": ended.reason}
    return {name: value for name, value in found.items() if value != ""}


def stages(request: RequestRecord) -> Iterator[tuple[str, float]]:
    """The stages that a request has reached, and the seconds of each."""
    if not request.queued_at:
        yield "decode", request.ended_at - request.received_at
        return
    yield "decode", request.queued_at - request.received_at
    if not request.runs:
        yield "queue", request.ended_at - request.queued_at
        return
    yield "queue", request.run_started_at - request.queued_at
    yield "run", request.run_ended_at - request.run_started_at
    if request.encoded_at:
        yield "encode", request.encoded_at - request.encode_started_at


def _milliseconds(seconds: float) -> float:
    return round(1000 * max(0.0, seconds), 3)
