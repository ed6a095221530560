"""What is noted of calls over gRPC, for the log of requests and for traces; and what callers say of theirs.

A call that is neither logged nor traced has no record, which costs the test of one attribute at each stage.
All moments are on `time.monotonic`'s clock. Values from before anything happened are those of the class, so
that a record is made quickly.
"""

import random
import re
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from attention_serving.server.engine.events import Timeline

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]
# The keys of gRPC's metadata, and the headers of HTTP.
REQUEST_ID, PARENT, STATE = "x-request-id", "traceparent", "tracestate"
# Visible ASCII, and short enough for a line of the log.
_SANE = re.compile(r"[!-~]{1,128}")
# Trace id and flags. Later versions may append fields. Source: https://www.w3.org/TR/trace-context/.
_PARENT = re.compile(
    r"(?!ff|00-.{52}-)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(?:-.*)?"
)
SAMPLED = 0x01


def new_request_id() -> str:
    """A new identifier: 128 random bits in hexadecimal. It names a request and protects nothing."""
    return f"{random.getrandbits(128):032x}"


def sent_request_id(metadata: Metadata) -> str:
    """The identifier that a caller has sent: 1 to 128 visible ASCII characters; otherwise empty."""
    for key, value in metadata:
        if key == REQUEST_ID:
            return value if isinstance(value, str) and _SANE.fullmatch(value) else ""
    return ""


def callers_trace(metadata: Metadata) -> tuple[str, bool] | None:
    """The id of the caller's trace, and whether it is sampled; None if it sent none that can be taken."""
    sent = [value for key, value in metadata if key == PARENT]
    # Two contradict each other.
    if len(sent) != 1 or not isinstance(sent[0], str) or (match := _PARENT.fullmatch(sent[0])) is None:
        return None
    return match[1], bool(int(match[2], 16) & SAMPLED)


class CallRecord:
    """One call over gRPC. It has ended when the core is done with it.

    Attributes:
        method: Full name of the method without the leading slash, such as
            attention.v1.AttentionService/Attend.
        request_id: What the caller and the log know it by; it may be set until the end.
        span: OpenTelemetry's span of it; None if it is not sampled.
        arrived_at: When it arrived.
        arrived_ns: The same in nanoseconds since 1970.
        ended_at: When it was answered; 0 before.
        is_stream: Whether it may have several requests.
        caller: The name of the caller; empty if it is not known.
        requests: Number of its requests.
        received_bytes: Size of all messages that were received.
        sent_bytes: Size of all replies.
        timeline: That of the request of a call that is not a stream; None if it has not arrived.
        code: What the call ended with.
        reason: The stable reason of an error; empty if there is none.
    """

    ended_at = 0.0
    span: Any = None
    caller = code = reason = ""
    requests = received_bytes = sent_bytes = 0
    timeline: Timeline | None = None

    def __init__(
        self,
        method: str,
        request_id: str,
        metadata: Metadata,
        *,
        is_stream: bool,
        report: "Callable[[CallRecord, Timeline | None], None]",
        start_span: Callable[[Any], Any] = lambda _: None,
    ) -> None:
        """Begins a record.

        Args:
            method: Full name of the method.
            request_id: What the caller and the log know the call by.
            metadata: Its metadata.
            is_stream: Whether it may have several requests.
            report: Called with the record and each request of a stream that ended; at the end of the call
                with the record and the request of a call that is not a stream, or None.
            start_span: Starts the span of a request of a stream, given the stream's. It may return None.
        """
        self.method, self.request_id, self._metadata = method.removeprefix("/"), request_id, metadata
        self.arrived_at, self.arrived_ns = time.monotonic(), time.time_ns()
        self.is_stream, self._report, self._start_span = is_stream, report, start_span
        self._open: dict[Timeline, None] = {}

    @property
    def trace_id(self) -> str:
        """The trace that it belongs to, if it is sampled or its caller sent one; otherwise empty."""
        if self.span is not None:
            return f"{self.span.get_span_context().trace_id:032x}"
        trace_id, _ = callers_trace(self._metadata) or ("", False)
        return trace_id

    def since_1970(self, moment: float) -> int:
        """A moment in nanoseconds since 1970."""
        return self.arrived_ns + int((moment - self.arrived_at) * 1_000_000_000)

    def start_timeline(self, size: int) -> Timeline:
        """Begins the timeline of a request, which has arrived in a message of so many bytes."""
        timeline = Timeline(size)
        self.requests += 1
        self.received_bytes += size
        if self.is_stream:
            self._open[timeline] = None
        else:
            self.timeline = timeline
        if self.span is not None:
            timeline.span = self._start_span(self.span) if self.is_stream else self.span
            if timeline.span is not None:
                timeline.reference = timeline.span.get_span_context()
        return timeline

    def subject(self, timeline: Timeline | None) -> "CallRecord | Timeline":
        """The subject of a report: a request of a stream, or else the call."""
        return timeline if self.is_stream and timeline is not None else self

    def end_timeline(self, timeline: Timeline) -> None:
        """The reply to a request of a stream was sent. Does nothing for other calls, which end with it."""
        if self._open.pop(timeline, timeline) is None:
            timeline.ended_at = time.monotonic()
            self.sent_bytes += timeline.sent_bytes
            self._report(self, timeline)

    def end(self, code: str, reason: str) -> None:
        """The core is done with the call; its requests that have no reply end as it did."""
        for timeline in tuple(self._open):
            timeline.code, timeline.reason = code, reason
            self.end_timeline(timeline)
        self.ended_at = time.monotonic()
        self.code, self.reason = code, reason
        if self.timeline is not None:
            self.timeline.ended_at = self.ended_at
            self.timeline.code, self.timeline.reason = code, reason
            self.sent_bytes += self.timeline.sent_bytes
        self._report(self, self.timeline)
