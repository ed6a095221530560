"""What is recorded of a call and of each of its requests, for the log of requests and for traces.

A call that nobody records has no record: that costs the test of one attribute at each stage. All moments are
on `time.monotonic`'s clock. Values from before anything happened are those of the class, so that a record is
made quickly.
"""

import random
import time
from collections.abc import Callable

from attention_serving.server.engine.errors import EngineError
from attention_serving.server.engine.statistics import Reference, Timeline


def new_span_id() -> bytes:
    """8 random bytes, which are not all zero."""
    return (random.getrandbits(64) or 1).to_bytes(8)


class TraceContext:
    """The place of a call in a trace.

    Attributes:
        trace_id: 16 bytes.
        span_id: The span of the call, 8 bytes.
        parent_id: The caller's span, 8 bytes; empty if the trace begins here.
        sampled: Whether the spans of the call are exported.
        state: The caller's `tracestate`, as it was sent.
    """

    __slots__ = ("parent_id", "sampled", "span_id", "state", "trace_id")

    def __init__(
        self, trace_id: bytes, span_id: bytes, *, sampled: bool, parent_id: bytes = b"", state: str = ""
    ) -> None:
        self.trace_id, self.span_id, self.parent_id = trace_id, span_id, parent_id
        self.sampled, self.state = sampled, state

    @property
    def reference(self) -> Reference:
        """The span of the call."""
        return self.trace_id, self.span_id


class RequestRecord(Timeline):
    """One request: a call of one request, or a message of a stream.

    Attributes:
        received_at: When its message had arrived.
        received_bytes: Size of the message.
        encode_started_at: When its reply began to be encoded; 0 if there was no result.
        encoded_at: When it was encoded.
        sent_bytes: Size of the reply.
        ended_at: When the reply of a stream's message was sent, or the call had ended; 0 before.
        code: What it ended with, such as OK.
        reason: The stable reason of an error; empty if there is none.
    """

    encode_started_at = encoded_at = ended_at = 0.0
    sent_bytes = 0
    code, reason = "OK", ""

    def __init__(self, received_bytes: int) -> None:
        self.received_at = time.monotonic()
        self.received_bytes = received_bytes

    def failed(self, error: BaseException) -> None:
        """Notes what the request failed with."""
        shown = error if isinstance(error, EngineError) else EngineError("")
        self.code, self.reason = shown.code.name, shown.reason

    def encoded(self, started_at: float, size: int) -> None:
        """Notes that the reply was encoded, which began at a moment."""
        self.encode_started_at, self.encoded_at = started_at, time.monotonic()
        self.sent_bytes = size


class CallRecord:
    """One call, from its arrival to its end.

    Attributes:
        method: Its full name without the leading slash, such as attention.v1.AttentionService/Attend.
        is_stream: Whether it may have several requests.
        request_id: What the caller and the log know it by.
        caller: The name of the caller; empty if it is not known.
        trace: Its place in a trace; None if it has none.
        arrived_at: When it arrived.
        arrived_ns: The same in nanoseconds since 1970.
        ended_at: When the core was done with it; 0 before.
        requests: Number of its requests.
        received_bytes: Size of all messages that were received.
        sent_bytes: Size of all replies.
        request: The request of a call that is not a stream; None if it has not arrived.
        code: What the call ended with.
        reason: The stable reason of an error; empty if there is none.
    """

    caller = code = reason = ""
    ended_at = 0.0
    requests = received_bytes = sent_bytes = 0
    request: RequestRecord | None = None

    def __init__(
        self,
        method: str,
        request_id: str,
        *,
        is_stream: bool,
        trace: TraceContext | None,
        report: "Callable[[CallRecord, RequestRecord | None], None]",
    ) -> None:
        """Begins a record.

        Args:
            method: Full name of the method.
            request_id: What the caller and the log know the call by; it may be set until the end.
            is_stream: Whether it may have several requests.
            trace: Its place in a trace; None if it has none.
            report: Called with the record and each request of a stream that ended; at the end of the call
                with the record and the request of a call that is not a stream, or None.
        """
        self.method, self.request_id = method.removeprefix("/"), request_id
        self.is_stream, self.trace, self._report = is_stream, trace, report
        self.arrived_at, self.arrived_ns = time.monotonic(), time.time_ns()
        self._open: dict[RequestRecord, None] = {}

    def received(self, size: int) -> RequestRecord:
        """A request of the call arrived, in a message of so many bytes."""
        record = RequestRecord(size)
        self.requests += 1
        self.received_bytes += size
        if self.is_stream:
            self._open[record] = None
        else:
            self.request = record
        if self.trace is not None and self.trace.sampled:
            own = new_span_id() if self.is_stream else self.trace.span_id
            record.reference = (self.trace.trace_id, own)
        return record

    def request_ended(self, record: RequestRecord) -> None:
        """The reply to a request of a stream was sent. Does nothing for other calls, which end with it."""
        if self._open.pop(record, record) is None:
            record.ended_at = time.monotonic()
            self.sent_bytes += record.sent_bytes
            self._report(self, record)

    def ended(self, code: str, reason: str) -> None:
        """The core is done with the call; its requests that have no reply end as it did."""
        for record in tuple(self._open):
            record.code, record.reason = code, reason
            self.request_ended(record)
        self.ended_at = time.monotonic()
        self.code, self.reason = code, reason
        if self.request is not None:
            self.request.ended_at = self.ended_at
            self.request.code, self.request.reason = code, reason
            self.sent_bytes += self.request.sent_bytes
        self._report(self, self.request)
