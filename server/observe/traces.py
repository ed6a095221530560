"""Spans of what was recorded, made and exported by OpenTelemetry's SDK. Imported only if traces are on.

A call over gRPC has a span, and its request has children: decode, queue, run and encode. A request of a
stream has a span of its own between the two. A run that several requests share is one span: a child of the
first of them that ended, linked to all of them, and they are linked to it. The children are made when their
request has ended.

Names follow OpenTelemetry's conventions: https://opentelemetry.io/docs/specs/semconv/rpc/.
"""

import logging
import os
import re
import threading
from random import getrandbits
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace import span as trace_span
from opentelemetry.trace.propagation import tracecontext

from attention_serving.server import NAME, VERSION
from attention_serving.server.engine.events import Timeline
from attention_serving.server.observe.records import PARENT, STATE, CallRecord, Metadata, callers_trace

log = logging.getLogger(__name__)
# How long the last spans may take to reach the collector when the process ends.
CLOSE_SECONDS = 1.5
# How long a call to the collector may take to end once it was cancelled.
CANCEL_SECONDS = 1.0
# Codes of gRPC that are the server's fault, of the same conventions.
ERRORS = frozenset(("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"))
# What samples new traces, as the description of a sampler begins, which the specification defines.
NEW_TRACES = re.compile(r"(?:ParentBased\{root:)?(?:AlwaysOffSampler|TraceIdRatioBased\{([^}]+)\})")


class Traces:
    """Makes and exports the spans of one process. Has a thread, so that it is made after the last fork."""

    def __init__(self, *, host: str = "", port: int = 0) -> None:
        """Starts the thread. A collector that cannot be reached is reported in the log.

        Args:
            host: The address that the server listens on.
            port: The port; 0 if it is not known.
        """
        # The library logs what it does not take of a caller's headers: text that anybody may send.
        for reader in (trace_span, tracecontext):
            logging.getLogger(reader.__name__).setLevel(logging.ERROR)
        self._server = {"server.address": host, "server.port": port or ""}
        self._exporter = OTLPSpanExporter()
        self._ids = _Ids()
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False, id_generator=self._ids)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer(NAME, VERSION)
        self._propagator = tracecontext.TraceContextTextMapPropagator()
        self._follows_caller = isinstance(self._provider.sampler, ParentBased)
        match = NEW_TRACES.match(self._provider.sampler.get_description())
        ratio = float(match[1] or 0) if match else 1.0
        # Of the ids of new traces, the sampler takes those whose lower half is less.
        self._bound = TraceIdRatioBased.get_bound_for_rate(ratio)

    def begin(self, method: str, metadata: Metadata) -> Span | None:
        """Starts the span of a call over gRPC, given its method and metadata; None if it is not sampled.

        The library takes 5 of the 100 microseconds of a small call for one that is not sampled, and 20 if its
        caller has sent a context. What it would decide is found out before, in 1 to 2 microseconds.
        """
        caller, carrier = callers_trace(metadata), {}
        if caller is None:
            if self._ids.next_trace & TraceIdRatioBased.TRACE_ID_LIMIT >= self._bound:
                self._ids.next_trace = getrandbits(128)
                return None
        elif self._follows_caller and not caller[1]:
            return None
        else:
            carrier = {key: value for key, value in metadata if key in (PARENT, STATE)}
        context = self._propagator.extract(carrier, Context())
        span = self._tracer.start_span(method.removeprefix("/"), context, SpanKind.SERVER)
        return span if span.is_recording() else None

    def start_request(self, call: Span) -> Span:
        """Starts the span of a request of a stream."""
        return self._tracer.start_span("request", set_span_in_context(call, Context()))

    def ended(self, call: CallRecord, timeline: Timeline | None) -> None:
        """Makes the spans of a call that has ended, or of a request of a stream that has."""
        if call.span is None:
            return
        values: dict[str, Any] = {}
        if timeline is not None:
            self._stages(call, timeline)
            if timeline.model:
                values = {"attention.model": timeline.model, "attention.version": timeline.version}
                values |= {"attention.sequences": timeline.sequences or ""}
                values |= {"attention.rows": timeline.rows or ""}
        subject = call.subject(timeline)
        values |= {"rpc.response.status_code": subject.code, "attention.reason": subject.reason}
        if subject is call:
            values |= {"rpc.system.name": "grpc", "rpc.method": call.method, **self._server}
            values |= {"attention.request_id": call.request_id}
            values |= {"attention.requests": call.requests} if call.is_stream else {}
        if subject.code in ERRORS:
            values |= {"error.type": subject.code}
            subject.span.set_status(StatusCode.ERROR)
        subject.span.set_attributes({name: value for name, value in values.items() if value != ""})
        subject.span.end(call.since_1970(subject.ended_at))

    def _stages(self, call: CallRecord, timeline: Timeline) -> None:
        """The spans below that of a request."""
        context = set_span_in_context(timeline.span, Context())

        def add(name: str, start: float, end: float, **options: Any) -> Span:
            span = self._tracer.start_span(name, context, start_time=call.since_1970(start), **options)
            span.end(call.since_1970(max(start, end)))
            return span

        for name, start, end in timeline.stages():
            if name != "run":
                add(name, start, end)
        for run in timeline.runs:
            if run.reference is None:
                computed = run.rows + run.padding
                values = {
                    "attention.model": run.model,
                    "attention.version": run.version,
                    "attention.precision": run.precision,
                    "attention.graph": run.graph,
                    "attention.sequences": run.sequences,
                    "attention.rows": run.rows,
                    "attention.padding_share": round(run.padding / computed, 4) if computed else 0.0,
                }
                links = [Link(reference) for reference in run.span_contexts] if run.is_shared else []
                span = add("run", run.started_at, run.ended_at, attributes=values, links=links)
                run.reference = span.get_span_context()
            if run.is_shared:
                timeline.span.add_link(run.reference)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Sends what is queued; gives up after a time. May be called more than once.

        Args:
            seconds: How long that may take.
        """
        # The processor's own limit is 30 seconds.
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(seconds)
        if closing.is_alive():
            log.warning("traces lost: the collector did not take them in time", extra={"seconds": seconds})
            self._exporter.shutdown()
            # A thread that is still inside gRPC can hold up the end of the interpreter.
            closing.join(CANCEL_SECONDS)


class _Ids(RandomIdGenerator):
    """Draws the id of the next trace ahead, because a sampler decides by it.

    Attributes:
        next_trace: That id, of 128 random bits.
    """

    def __init__(self) -> None:
        self.next_trace = getrandbits(128)

    def generate_trace_id(self) -> int:
        """The id that was drawn."""
        drawn, self.next_trace = self.next_trace, getrandbits(128)
        return drawn


def _resource() -> Resource:
    """What the process is called; OpenTelemetry's variables take precedence over the names."""
    variables = OTELResourceDetector().detect().attributes
    names = {"service.name": NAME, "service.version": VERSION}
    return Resource.create({**names, **variables, "process.pid": os.getpid()})
