"""Spans of requests over HTTP, whose children are the spans of the gRPC server.

Names follow OpenTelemetry's conventions for HTTP: https://opentelemetry.io/docs/specs/semconv/http/.
"""

from collections.abc import Iterator
from functools import partial
from http import HTTPStatus

from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from server.http.record import HttpRecord
from server.rpc.records import TraceContext
from server.tracing.context import Head, Metadata
from server.tracing.export import Pipeline
from server.tracing.messages import ERROR, LOCAL, REMOTE, SERVER, Clock, attributes
from server.tracing.options import TraceOptions

MAX_PATH = 200


class HttpTracing:
    """Traces the requests of the HTTP process."""

    def __init__(self, options: TraceOptions) -> None:
        """Starts the exporter.

        Args:
            options: Where spans go, and which requests are sampled.
        """
        self._head = Head(options)
        self._pipeline = Pipeline(options.endpoint, role="http")
        self._server = attributes({"server.address": options.host, "server.port": options.port or ""})

    def begin(self, headers: Metadata) -> TraceContext:
        """The place of a new request in a trace. The gRPC server follows what is decided here."""
        return self._head.begin_always(headers)

    def ended(self, request: HttpRecord) -> None:
        """Exports the span of a request that is sampled."""
        if request.trace is not None and request.trace.sampled:
            self._pipeline.add(partial(http_spans, request, request.trace, self._server))

    def close(self) -> None:
        """Sends the last spans."""
        self._pipeline.close()


def http_spans(request: HttpRecord, trace: TraceContext, server: list[KeyValue]) -> Iterator[Span]:
    """The span of a request that has ended.

    Args:
        request: The request.
        trace: Its place in a trace.
        server: Attributes of the span of a server.
    """
    is_error = request.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    values = {
        "http.request.method": request.method,
        "http.route": request.route,
        "http.response.status_code": request.status,
        "url.scheme": request.scheme,
        "error.type": str(request.status) if is_error else "",
    }
    own = [*server, *attributes(values)]
    for key, value in (("url.path", request.path[:MAX_PATH]), ("attention.request_id", request.request_id)):
        own.append(KeyValue(key=key))  # not cached: many values
        own[-1].value.string_value = value
    yield Span(
        trace_id=trace.trace_id.to_bytes(16),
        span_id=trace.span_id.to_bytes(8),
        parent_span_id=trace.parent_id.to_bytes(8) if trace.parent_id else b"",
        trace_state=trace.state,
        flags=REMOTE if trace.parent_id else LOCAL,
        name=f"{request.method} {request.route}",
        kind=SERVER,
        start_time_unix_nano=request.arrived_ns,
        end_time_unix_nano=Clock(request.arrived_at, request.arrived_ns)(request.ended_at),
        attributes=own,
        status=ERROR if is_error else None,
    )
