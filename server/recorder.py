"""Decides which gRPC calls are recorded, and hands what was recorded to the log and to the traces."""

from collections.abc import Callable
from typing import Protocol

from attention_serving.server.errors import ServerError
from attention_serving.server.records import CallRecord, RequestRecord, TraceContext
from attention_serving.server.request_log import LoggedRequests, RequestLog
from attention_serving.server.settings import Settings
from attention_serving.server.tracing.context import Head
from attention_serving.server.tracing.options import TraceOptions, trace_options
from attention_serving.server.transport.call import Call, Metadata


class Tracing(Protocol):
    """Traces of calls: `server.tracing.calls.CallTracing`."""

    @property
    def begin(self) -> Callable[[Metadata], TraceContext | None]:
        """Returns the place of a new call in a trace; None if it has none."""

    def ended(self, call: CallRecord, request: RequestRecord | None) -> None:
        """Exports the spans of what has ended, if the call is sampled."""

    def close(self) -> None:
        """Sends the last spans."""


class CallRecorder:
    """Records calls for the log of requests and for traces."""

    def __init__(self, log: RequestLog | None, tracing: Tracing | None) -> None:
        """Takes what is switched on, at least one of the two."""
        self._log, self._tracing = log, tracing
        # Without traces, the log still names the trace of a caller.
        self._begin = tracing.begin if tracing is not None else Head(TraceOptions(ratio=0.0)).begin

    def __call__(self, call: Call, is_stream: bool) -> CallRecord | None:  # noqa: FBT001 - as the dispatcher calls it
        """The record of a new call; None if nobody is interested in it."""
        trace = self._begin(call.metadata)
        if self._log is None and (trace is None or not trace.sampled):
            return None
        # Traces, and a log of failures, need the identifier of few calls. It is sent once it was read.
        is_named = self._log is not None and (is_stream or not self._log.failed_only)
        request_id = call.request_id if is_named else ""
        return CallRecord(call.method, request_id, is_stream=is_stream, trace=trace, report=self._ended)

    def close(self) -> None:
        """Sends the last spans."""
        if self._tracing is not None:
            self._tracing.close()

    def _ended(self, call: CallRecord, request: RequestRecord | None) -> None:
        if self._log is not None:
            self._log.ended(call, request)
        if self._tracing is not None:
            self._tracing.ended(call, request)


def call_recorder(settings: Settings) -> CallRecorder | None:
    """The recorder that the settings and OpenTelemetry's variables ask for; None if they ask for nothing.

    Raises:
        ServerError: A variable of OpenTelemetry is not valid.
    """
    logged = LoggedRequests(settings.log_requests)
    log = None
    if logged is not LoggedRequests.NONE:
        log = RequestLog(failed_only=logged is LoggedRequests.FAILED)
    tracing = _tracing(settings)
    return CallRecorder(log, tracing) if log is not None or tracing is not None else None


def _tracing(settings: Settings) -> Tracing | None:
    options = trace_options(settings.trace_endpoint, host=settings.host, port=settings.port)
    if options is None:
        return None
    # OpenTelemetry is imported only if traces are on.
    from attention_serving.server.tracing.calls import CallTracing  # noqa: PLC0415

    try:
        return CallTracing(options)
    except Exception as error:
        # The library's own errors, such as a variable that is not a number.
        raise ServerError(f"traces cannot be exported: {error}") from error
