"""Spans from the records of gRPC calls. For the exporter's thread.

A call has a span of the server, and its request has children: decode, queue, run and encode. A request of a
stream has a span of its own between the two. A run that several requests share is one span: a child of the
first of them that ended, linked to all of them, and they are linked to it.

Names follow OpenTelemetry's conventions for RPC: https://opentelemetry.io/docs/specs/semconv/rpc/.
"""

from collections.abc import Iterator

from server.engine.timeline import RecordedRun, Reference
from server.rpc.records import CallRecord, RequestRecord, TraceContext, new_span_id
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

# Codes that are the server's fault, of the same conventions.
ERRORS = frozenset(("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"))


def call_spans(call: CallRecord, request: RequestRecord | None, server: Attributes) -> Iterator[bytes]:
    """The serialized spans of a call that has ended, or of a request of a stream that has.

    Args:
        call: The call.
        request: The request, or the only one of a call; None if it never arrived, and at the end of a stream.
        server: Attributes of the span of a server.
    """
    if call.trace is None:
        return
    clock = Clock(call.arrived_at, call.arrived_ns)
    if request is not None and request.reference is not None:
        yield from _stages(request, request.reference, clock)
        if call.is_stream:
            yield _streamed(call.trace, request, request.reference, clock)
    if request is None or not call.is_stream:
        yield _server(call, call.trace, request, clock, server)


def _server(
    call: CallRecord,
    trace: TraceContext,
    request: RequestRecord | None,
    clock: Clock,
    server: Attributes,
) -> bytes:
    is_error = call.code in ERRORS
    values = (
        *server,
        ("rpc.method", call.method),
        ("rpc.response.status_code", call.code),
        ("error.type", call.code if is_error else ""),
        ("attention.reason", call.reason),
        ("attention.requests", call.requests if call.is_stream else ""),
        *_of_request(request),
    )
    found = span(
        call.method,
        SpanPlace(trace.trace_id, trace.span_id, trace.parent_id),
        call.arrived_ns,
        clock(call.ended_at),
        kind=SERVER,
        flags=REMOTE if trace.parent_id else LOCAL,
        values=values,
        is_error=is_error,
        links=_shared_runs(request) if request is not None else (),
    )
    return found + trace_state(trace.state) + unique_attribute("attention.request_id", call.request_id)


def _streamed(trace: TraceContext, request: RequestRecord, reference: Reference, clock: Clock) -> bytes:
    """The span of one request of a stream, a child of the span of the call."""
    trace_id, span_id = reference
    is_error = request.code in ERRORS
    return span(
        "request",
        SpanPlace(trace_id, span_id, trace.span_id),
        clock(request.received_at),
        clock(request.ended_at),
        values=(
            ("rpc.response.status_code", request.code),
            ("attention.reason", request.reason),
            *_of_request(request),
            ("error.type", request.code if is_error else ""),
        ),
        is_error=is_error,
        links=_shared_runs(request),
    )


def _of_request(request: RequestRecord | None) -> Attributes:
    if request is None or not request.model:
        return ()
    return (
        ("attention.model", request.model),
        ("attention.version", request.version),
        ("attention.sequences", request.sequences or ""),
        ("attention.rows", request.rows or ""),
    )


def _stages(request: RequestRecord, own: Reference, clock: Clock) -> Iterator[bytes]:
    """The spans of the stages that the request has reached."""
    end = clock(request.ended_at)
    queued = clock(request.queued_at) if request.queued_at else end
    yield span("decode", _child(own), clock(request.received_at), queued)
    if request.queued_at:
        started = clock(request.run_started_at) if request.runs else end
        yield span("queue", _child(own), queued, started)
    for run in request.runs:
        if run.reference is None:  # the first of the requests that the run computed
            yield _run(run, own, clock)
    if request.encoded_at:
        yield span("encode", _child(own), clock(request.encode_started_at), clock(request.encoded_at))


def _child(parent: Reference) -> SpanPlace:
    """The place of a new span."""
    trace_id, span_id = parent
    return SpanPlace(trace_id, new_span_id(), span_id)


def _run(run: RecordedRun, parent: Reference, clock: Clock) -> bytes:
    place = _child(parent)
    run.reference = place.trace_id, place.span_id
    computed = run.rows + run.padding
    values = (
        ("attention.model", run.model),
        ("attention.version", run.version),
        ("attention.precision", run.precision),
        ("attention.graph", run.graph),
        ("attention.sequences", run.sequences),
        ("attention.rows", run.rows),
        ("attention.padding_share", round(run.padding / computed, 4) if computed else 0.0),
    )
    links = run.requests if _is_shared(run) else ()
    return span("run", place, clock(run.started_at), clock(run.ended_at), values=values, links=links)


def _is_shared(run: RecordedRun) -> bool:
    """Whether several of its requests are traced."""
    return len(run.requests) > 1


def _shared_runs(request: RequestRecord) -> list[Reference]:
    return [run.reference for run in request.runs if run.reference is not None and _is_shared(run)]
