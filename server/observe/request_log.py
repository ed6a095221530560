"""Decides which calls and requests over HTTP are recorded, and writes a line of the log for each.

A line says what a request was, how large, where its time went, and how it ended. Nothing of a request's
content is logged, and nothing that its caller sent but its identifiers. What is sampled has spans too.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from attention_serving.server.errors import ServerError
from attention_serving.server.observe.records import (
    PARENT,
    REQUEST_ID,
    STATE,
    CallRecord,
    HttpRecord,
    Record,
    RequestRecord,
    new_request_id,
    sent_request_id,
)
from attention_serving.server.settings import Settings

if TYPE_CHECKING:  # OpenTelemetry is imported only if traces are on, and the supervisor needs no gRPC
    from attention_serving.server.observe.traces import Traces
    from attention_serving.server.transport.call import Call

T = TypeVar("T")
log = logging.getLogger("attention_serving.server.requests")
# Has the level of the whole log.
debug = logging.getLogger(__name__)
# The least status over HTTP of a request that failed.
FAILED = 400
DISABLED, EXPORTER = "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_READ = {key.encode(): key for key in (REQUEST_ID, PARENT, STATE)}


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """How calls are traced. OpenTelemetry's variables say the rest.

    Attributes:
        endpoint: URL of the collector; empty leaves it to OpenTelemetry's variables.
        host: The address that the server listens on.
        port: The port; 0 if it is not known.
    """

    endpoint: str = ""
    host: str = ""
    port: int = 0


def trace_options(
    endpoint: str,
    *,
    host: str = "",
    port: int = 0,
    environment: Mapping[str, str] = os.environ,
) -> TraceOptions | None:
    """The options of traces; None if neither the setting nor OpenTelemetry's variables ask for them.

    Args:
        endpoint: The setting `trace_endpoint`, which precedes its variable; empty if it is not set.
        host: The address that the server listens on.
        port: The port; 0 if it is not known.
        environment: Environment variables.
    """
    exporters = {name.strip() for name in environment.get(EXPORTER, "").split(",")} - {""}
    asked = exporters & {"otlp", "none"} == {"otlp"} if exporters else any(map(environment.get, ENDPOINTS))
    if environment.get(DISABLED, "").strip().lower() == "true" or not (endpoint or asked):
        return None
    return TraceOptions(endpoint=endpoint, host=host, port=port)


class Recorder:
    """Records calls or requests over HTTP, and hands the records to the log and to the traces."""

    def __init__(self, log_requests: str, traces: TraceOptions | None = None, role: str = "") -> None:
        """Starts the exporter of traces, if they are on. The lines are written whatever the log's level is.

        Args:
            log_requests: Requests that have a line: all, failed or none.
            traces: How they are traced; None if they are not.
            role: Tells the processes of one service apart in traces, such as http.

        Raises:
            ServerError: A variable of OpenTelemetry is not valid.
        """
        self._logs, self._failed_only = log_requests != "none", log_requests == "failed"
        if self._logs:
            log.setLevel(logging.INFO)
        self._traces = None if traces is None else _traces(traces, role)

    def __call__(self, call: "Call", is_stream: bool) -> CallRecord | None:  # noqa: FBT001 - as the dispatcher calls it
        """The record of a new call over gRPC; None if nobody is interested in it."""
        span = None
        if self._traces is not None:
            span = _safely(partial(self._traces.begin, call.method, call.metadata))
        if span is None and not self._logs:
            return None
        # Traces, and a log of failures, need the identifier of few calls. It is sent once it was read.
        is_named = self._logs and (is_stream or not self._failed_only)
        request_id = call.request_id if is_named else ""
        record = CallRecord(call.method, request_id, call.metadata, is_stream=is_stream, report=self._ended)
        if self._traces is not None:
            start = self._traces.start_request
            record.span, record.start_span = span, lambda stream: _safely(partial(start, stream))
        return record

    def http_request(self, scope: Mapping[str, Any], route: str) -> HttpRecord:
        """The record of a new request over HTTP.

        Args:
            scope: The request, as ASGI describes it, with names of headers in lower case.
            route: Its path, with names of parameters in braces.
        """
        headers = [
            (_READ[name], value.decode("latin-1")) for name, value in scope["headers"] if name in _READ
        ]
        record = HttpRecord(scope, route, sent_request_id(headers) or new_request_id(), headers)
        if self._traces is not None:
            begun = _safely(partial(self._traces.begin_http, f"{record.method} {route}", headers))
            record.span, record.traced = begun or (None, ())
        return record

    def http_ended(self, record: HttpRecord, status: int) -> None:
        """A request over HTTP was answered, or its client left."""
        record.status, record.ended_at = status, time.monotonic()
        if debug.isEnabledFor(logging.DEBUG):
            total = _milliseconds(record.ended_at - record.arrived_at)
            shown = {"method": record.method, "path": record.path, "status": status, "milliseconds": total}
            debug.debug("request ended", extra=shown)
        if self._logs and not (self._failed_only and status < FAILED):
            _safely(lambda: log.info("http request", extra=http_fields(record)))
        if self._traces is not None:
            _safely(partial(self._traces.http_ended, record))

    def close(self) -> None:
        """Sends the last spans."""
        if self._traces is not None:
            self._traces.close()

    def _ended(self, call: CallRecord, request: RequestRecord | None) -> None:
        """A call over gRPC has ended, or a request of a stream."""
        in_stream = request if call.is_stream else None
        code = call.code if in_stream is None else in_stream.code
        if self._logs and not (self._failed_only and code == "OK"):
            event = "stream" if call.is_stream and request is None else "request"
            _safely(lambda: log.info(event, extra=fields(call, request)))
        if self._traces is not None:
            _safely(partial(self._traces.ended, call, request))


def _safely(step: Callable[[], T]) -> T | None:
    """What a step returns; None if it fails, which is logged: what observes calls must not break them."""
    try:
        return step()
    except Exception:
        debug.exception("not recorded")
        return None


def recorder_of(settings: Settings) -> Recorder | None:
    """The recorder that the settings and OpenTelemetry's variables ask for; None if they ask for nothing.

    Raises:
        ServerError: A variable of OpenTelemetry is not valid.
    """
    traces = trace_options(settings.trace_endpoint, host=settings.host, port=settings.port)
    if traces is None and settings.log_requests == "none":
        return None
    return Recorder(settings.log_requests, traces)


def _traces(options: TraceOptions, role: str) -> "Traces":
    from attention_serving.server.observe.traces import Traces  # noqa: PLC0415 - only if traces are on

    try:
        return Traces(options.endpoint, host=options.host, port=options.port, role=role)
    except Exception as error:
        # The library's own errors, such as a variable that is not a number.
        raise ServerError(f"traces cannot be exported: {error}") from error


def http_fields(record: HttpRecord) -> dict[str, object]:
    """The fields of the line of a request over HTTP."""
    total = _milliseconds(record.ended_at - record.arrived_at)
    return {**_head(record), "route": record.route, "total_ms": total, "status": record.status}


def fields(call: CallRecord, request: RequestRecord | None) -> dict[str, object]:
    """The fields of the line of a call over gRPC, without those that nothing is known of.

    Args:
        call: The call.
        request: The request; None at the end of a stream, and if it never arrived.
    """
    found = _head(call)
    if request is None:
        found |= {"requests": call.requests} if call.is_stream else {}
        found |= {"bytes_in": call.received_bytes, "bytes_out": call.sent_bytes}
    else:
        found |= {"model": request.model, "version": request.version}
        found |= {"sequences": request.sequences or "", "rows": request.rows or ""}
        found |= {"bytes_in": request.received_bytes, "bytes_out": request.sent_bytes}
        found |= {f"{stage}_ms": _milliseconds(end - start) for stage, start, end in request.stages()}
    ended = request if call.is_stream and request is not None else call
    started = request.received_at if call.is_stream and request is not None else call.arrived_at
    found |= {"total_ms": _milliseconds(ended.ended_at - started), "code": ended.code, "reason": ended.reason}
    return {name: value for name, value in found.items() if value != ""}


def _head(record: Record) -> dict[str, object]:
    """The fields that say which request it was."""
    caller = {"caller": record.caller} if isinstance(record, CallRecord) else {}
    found = {"request_id": record.request_id, "method": record.method, **caller, "trace_id": record.trace_id}
    return {name: value for name, value in found.items() if value}


def _milliseconds(seconds: float) -> float:
    return round(1000 * max(0.0, seconds), 3)
