"""Spans of requests over HTTP, whose children are the spans of the gRPC server.

Names follow OpenTelemetry's conventions for HTTP: https://opentelemetry.io/docs/specs/semconv/http/.
"""

from collections.abc import Iterator
from functools import partial
from http import HTTPStatus

from server.http.record import HttpRecord
from server.rpc.records import TraceContext
from server.tracing.context import Head, Metadata
from server.tracing.export import Pipeline
from server.tracing.messages import (
    LOCAL,
    REMOTE,
    SERVER,
    Attributes,
    Clock,
    SpanPlace,
    span,
    trace_state,
    unique_attribute,
)
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
        self._server: Attributes = (
            ("server.address", options.host),
            ("server.port", options.port or ""),
        )

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


def http_spans(request: HttpRecord, trace: TraceContext, server: Attributes) -> Iterator[bytes]:
    """The serialized span of a request that has ended.

    Args:
        request: The request.
        trace: Its place in a trace.
        server: Attributes of the span of a server.
    """
    is_error = request.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    values = (
        *server,
        ("http.request.method", request.method),
        ("http.route", request.route),
        ("http.response.status_code", request.status),
        ("url.scheme", request.scheme),
        ("error.type", str(request.status) if is_error else ""),
    )
    found = span(
        f"{request.method} {request.route}",
        SpanPlace(trace.trace_id, trace.span_id, trace.parent_id),
        request.arrived_ns,
        Clock(request.arrived_at, request.arrived_ns)(request.ended_at),
        kind=SERVER,
        flags=REMOTE if trace.parent_id else LOCAL,
        values=values,
        is_error=is_error,
    )
    own = [("url.path", request.path[:MAX_PATH]), ("attention.request_id", request.request_id)]
    yield b"".join([found, trace_state(trace.state), *(unique_attribute(*each) for each in own)])
