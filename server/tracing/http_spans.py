"""Spans of requests over HTTP, whose children are the spans of the gRPC server.

Names follow OpenTelemetry's conventions for HTTP: https://opentelemetry.io/docs/specs/semconv/http/.
"""

from functools import lru_cache, partial
from http import HTTPStatus

from attention_serving.server.http.record import HttpRecord
from attention_serving.server.records import TraceContext
from attention_serving.server.tracing.context import Head, Metadata
from attention_serving.server.tracing.export import Pipeline
from attention_serving.server.tracing.messages import (
    CACHED,
    LOCAL,
    REMOTE,
    SERVER,
    Attributes,
    SpanTemplate,
    nanoseconds,
    trace_state,
    unique_attribute,
)
from attention_serving.server.tracing.options import TraceOptions

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
            self._pipeline.add(partial(http_span, request, request.trace, self._server))

    def close(self) -> None:
        """Sends the last spans."""
        self._pipeline.close()


def http_span(request: HttpRecord, trace: TraceContext, server: Attributes) -> bytes:
    """The span of a request that has ended, as a serialized `ScopeSpans`.

    Args:
        request: The request.
        trace: Its place in a trace.
        server: Attributes of the span of a server.
    """
    template = _template(
        server, request.method, request.route, request.status, request.scheme, bool(trace.parent_id)
    )
    own = [
        unique_attribute("url.path", request.path[:MAX_PATH]),
        unique_attribute("attention.request_id", request.request_id),
        trace_state(trace.state),
    ]
    ended = request.arrived_ns + nanoseconds(request.ended_at - request.arrived_at)
    return template.filled(
        trace.trace_id, trace.span_id, trace.parent_id, request.arrived_ns, ended, b"".join(own)
    )


@lru_cache(CACHED)
def _template(
    server: Attributes,
    method: str,
    route: str,
    status: int,
    scheme: str,
    has_parent: bool,  # noqa: FBT001 - cached by position
) -> SpanTemplate:
    is_error = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return SpanTemplate(
        f"{method} {route}",
        kind=SERVER,
        flags=REMOTE if has_parent else LOCAL,
        values=(
            *server,
            ("http.request.method", method),
            ("http.route", route),
            ("http.response.status_code", status),
            ("url.scheme", scheme),
            ("error.type", str(status) if is_error else ""),
        ),
        is_error=is_error,
    )
