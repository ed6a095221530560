"""Notes requests over HTTP: their identifiers, their traces, and lines of the log."""

import logging
import time
from collections.abc import Iterator
from typing import Protocol

from starlette.types import Scope

from attention_serving.server import request_ids
from attention_serving.server.http.options import HttpOptions
from attention_serving.server.http.record import HttpRecord
from attention_serving.server.records import TraceContext
from attention_serving.server.tracing import context as trace_context
from attention_serving.server.tracing.options import TraceOptions

log = logging.getLogger("attention_serving.server.requests")
# Has the level of the whole log.
debug = logging.getLogger(__name__)
FAILED = 400


class Tracing(Protocol):
    """Traces of HTTP requests: `server.tracing.http_spans.HttpTracing`."""

    def begin(self, headers: trace_context.Metadata) -> TraceContext:
        """The place of a new request in a trace."""

    def ended(self, request: HttpRecord) -> None:
        """Exports its span if it is sampled."""

    def close(self) -> None:
        """Sends the last spans."""


class Observer:
    """Notes requests for the log and for traces."""

    def __init__(self, options: HttpOptions) -> None:
        """Starts the exporter of traces, if they are on.

        Args:
            options: Options of the process.
        """
        self._logs_from = {"all": 0, "failed": FAILED}.get(options.log_requests)
        if self._logs_from is not None:
            log.setLevel(logging.INFO)
        self._tracing = _tracing(options.traces)

    def begin(self, scope: Scope, route: str) -> HttpRecord:
        """A request arrived."""
        headers = dict(_headers(scope))
        request_id = request_ids.sane(headers.get(request_ids.KEY)) or request_ids.new()
        trace = self._tracing.begin(_headers(scope)) if self._tracing is not None else None
        return HttpRecord(scope, route, request_id, trace)

    def ended(self, request: HttpRecord, status: int) -> None:
        """A request was answered, or its client left."""
        request.status, request.ended_at = status, time.monotonic()
        if debug.isEnabledFor(logging.DEBUG):
            shown = {"method": request.method, "path": request.path, "status": status}
            debug.debug("request ended", extra={**shown, "milliseconds": _milliseconds(request)})
        if self._logs_from is not None and status >= self._logs_from:
            log.info("http request", extra=fields(request))
        if self._tracing is not None:
            self._tracing.ended(request)

    def close(self) -> None:
        """Sends the last spans."""
        if self._tracing is not None:
            self._tracing.close()


def _tracing(options: TraceOptions | None) -> Tracing | None:
    if options is None:
        return None
    # OpenTelemetry is imported only if traces are on.
    from attention_serving.server.tracing.http_spans import HttpTracing  # noqa: PLC0415

    return HttpTracing(options)


_READ = {key.encode(): key for key in (request_ids.KEY, trace_context.PARENT, trace_context.STATE)}


def _headers(scope: Scope) -> Iterator[tuple[str, str]]:
    """The headers that are read here; ASGI gives their names in lower case."""
    for name, value in scope["headers"]:
        if name in _READ:
            yield _READ[name], value.decode("latin-1")


def fields(request: HttpRecord) -> dict[str, object]:
    """The fields of a line of the log."""
    found: dict[str, object] = {"request_id": request.request_id}
    if request.trace is not None and (request.trace.sampled or request.trace.parent_id):
        found["trace_id"] = request.trace.trace_id.hex()
    found |= {"method": request.method, "route": request.route}
    return {**found, "total_ms": _milliseconds(request), "status": request.status}


def _milliseconds(request: HttpRecord) -> float:
    return round(1000 * (request.ended_at - request.arrived_at), 3)
