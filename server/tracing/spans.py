"""Spans from the records of gRPC calls.

A call has a span of the server, and its request has children: decode, queue, run and encode. A request of a
stream has a span of its own between the two. A run that several requests share is one span: a child of the
first of them that ended, linked to all of them, and they are linked to it.

Names follow OpenTelemetry's conventions for RPC: https://opentelemetry.io/docs/specs/semconv/rpc/.
"""

from functools import lru_cache

from attention_serving.server.engine.statistics import RecordedRun, Reference
from attention_serving.server.records import CallRecord, RequestRecord, TraceContext, new_span_id
from attention_serving.server.tracing.messages import (
    CACHED,
    LOCAL,
    REMOTE,
    SERVER,
    Attributes,
    SpanTemplate,
    linked,
    nanoseconds,
    trace_state,
    unique_attribute,
)

# Codes that are the server's fault, of the same conventions.
ERRORS = frozenset(("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"))
DECODE, QUEUE, ENCODE = SpanTemplate("decode"), SpanTemplate("queue"), SpanTemplate("encode")


def call_spans(call: CallRecord, request: RequestRecord | None, server: Attributes) -> bytes:
    """The spans of a call that has ended, or of a request of a stream that has, as a serialized `ScopeSpans`.

    Args:
        call: The call.
        request: The request, or the only one of a call; None if it never arrived, and at the end of a stream.
        server: Attributes of the span of a server.
    """
    if call.trace is None:
        return b""
    # What is added to moments of `time.monotonic`, in nanoseconds, for those since 1970.
    shift = call.arrived_ns - nanoseconds(call.arrived_at)
    spans = []
    if request is not None and request.reference is not None:
        spans = _stages(request, request.reference, shift)
        if call.is_stream:
            spans.append(_streamed(call.trace, request, request.reference, shift))
    if request is None or not call.is_stream:
        spans.append(_server(call, call.trace, request, shift, server))
    return b"".join(spans)


def _stages(request: RequestRecord, own: Reference, shift: int) -> list[bytes]:
    """The spans of the stages that the request, whose span is given, has reached."""
    trace_id, span_id = own
    moments = (
        request.received_at,
        request.queued_at,
        request.run_started_at,
        request.encode_started_at,
        request.encoded_at,
        request.ended_at,
    )
    received, queued, started, encode_started, encoded, ended = [
        shift + nanoseconds(moment) for moment in moments
    ]
    if not request.queued_at:
        return [DECODE.filled(trace_id, new_span_id(), span_id, received, ended)]
    spans = [
        DECODE.filled(trace_id, new_span_id(), span_id, received, queued),
        QUEUE.filled(trace_id, new_span_id(), span_id, queued, started if request.runs else ended),
    ]
    # Of a run that requests share, the first of them that ended.
    spans += [_run(run, own, shift) for run in request.runs if run.reference is None]
    if request.encoded_at:
        spans.append(ENCODE.filled(trace_id, new_span_id(), span_id, encode_started, encoded))
    return spans


def _run(run: RecordedRun, parent: Reference, shift: int) -> bytes:
    trace_id, parent_id = parent
    run.reference = trace_id, new_span_id()
    template = _run_template(
        run.model, run.version, run.precision, run.graph, run.sequences, run.rows, run.padding
    )
    started, ended = shift + nanoseconds(run.started_at), shift + nanoseconds(run.ended_at)
    links = linked(run.requests) if run.is_shared else b""
    return template.filled(*run.reference, parent_id, started, ended, links)


@lru_cache(CACHED)
def _run_template(
    model: str, version: str, precision: str, graph: str, sequences: int, rows: int, padding: int
) -> SpanTemplate:
    computed = rows + padding
    return SpanTemplate(
        "run",
        values=(
            ("attention.model", model),
            ("attention.version", version),
            ("attention.precision", precision),
            ("attention.graph", graph),
            ("attention.sequences", sequences),
            ("attention.rows", rows),
            ("attention.padding_share", round(padding / computed, 4) if computed else 0.0),
        ),
    )


def _shared_runs(request: RequestRecord) -> bytes:
    """Links to the runs that the request shares with others."""
    shared = [run.reference for run in request.runs if run.reference is not None and run.is_shared]
    return linked(shared) if shared else b""


def _streamed(trace: TraceContext, request: RequestRecord, own: Reference, shift: int) -> bytes:
    """The span of one request of a stream, a child of the span of the call."""
    template = _request_template(
        request.code, request.reason, request.model, request.version, request.sequences, request.rows
    )
    received, ended = shift + nanoseconds(request.received_at), shift + nanoseconds(request.ended_at)
    return template.filled(*own, trace.span_id, received, ended, _shared_runs(request))


@lru_cache(CACHED)
def _request_template(
    code: str, reason: str, model: str, version: str, sequences: int, rows: int
) -> SpanTemplate:
    is_error = code in ERRORS
    return SpanTemplate(
        "request",
        values=(
            ("rpc.response.status_code", code),
            ("attention.reason", reason),
            *_of_request(model, version, sequences, rows),
            ("error.type", code if is_error else ""),
        ),
        is_error=is_error,
    )


def _server(
    call: CallRecord, trace: TraceContext, request: RequestRecord | None, shift: int, server: Attributes
) -> bytes:
    template = _server_template(
        server,
        call.method,
        call.code,
        call.reason,
        call.requests if call.is_stream else "",
        bool(trace.parent_id),
        *((request.model, request.version, request.sequences, request.rows) if request is not None else ()),
    )
    ended = shift + nanoseconds(call.ended_at)
    own = _of_this_call(call, trace, request)
    return template.filled(trace.trace_id, trace.span_id, trace.parent_id, call.arrived_ns, ended, own)


def _of_this_call(call: CallRecord, trace: TraceContext, request: RequestRecord | None) -> bytes:
    """The fields that the span of no other call has."""
    own = trace_state(trace.state) if trace.state else b""
    if call.request_id:
        own += unique_attribute("attention.request_id", call.request_id)
    return own + _shared_runs(request) if request is not None else own


@lru_cache(CACHED)
def _server_template(
    server: Attributes,
    method: str,
    code: str,
    reason: str,
    requests: int | str,
    has_parent: bool,  # noqa: FBT001 - cached by position
    model: str = "",
    version: str = "",
    sequences: int = 0,
    rows: int = 0,
) -> SpanTemplate:
    is_error = code in ERRORS
    return SpanTemplate(
        method,
        kind=SERVER,
        flags=REMOTE if has_parent else LOCAL,
        values=(
            *server,
            ("rpc.method", method),
            ("rpc.response.status_code", code),
            ("error.type", code if is_error else ""),
            ("attention.reason", reason),
            ("attention.requests", requests),
            *_of_request(model, version, sequences, rows),
        ),
        is_error=is_error,
    )


def _of_request(model: str, version: str, sequences: int, rows: int) -> Attributes:
    if not model:
        return ()
    return (
        ("attention.model", model),
        ("attention.version", version),
        ("attention.sequences", sequences or ""),
        ("attention.rows", rows or ""),
    )
