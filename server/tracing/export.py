"""Exports spans with OTLP over gRPC: a bounded queue, and a thread that empties it.

Everything about the collector (its address, TLS, headers, compression, retries) and about the queue is
OpenTelemetry's SDK, with its environment variables. Only the messages are made here: see `messages`.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource as ResourceMessage
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanContext, TraceFlags

from server import NAME, VERSION
from server.rpc.protobuf_bytes import field
from server.tracing.messages import plain_attributes

log = logging.getLogger(__name__)
# How long the last spans may take to reach the collector when the process ends.
CLOSE_SECONDS = 1.5
# How long a call to the collector may take to end once it was cancelled.
CANCEL_SECONDS = 1.0
# Calls whose spans are made before other threads may have the interpreter: 0.5 ms. To hand it over costs more
# than the spans of one call.
MADE_AT_ONCE = 16
SCOPE = InstrumentationScope(name=NAME, version=VERSION)
SPANS = (ScopeSpans.SPANS_FIELD_NUMBER,)


class Finished(ReadableSpan):
    """What has ended and will become spans on the exporter's thread. The processor only queues it."""

    _any = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def __init__(self, spans: Callable[[], Iterable[bytes]]) -> None:
        """Takes a function that makes the serialized spans."""
        self.make_spans = spans

    @property
    def context(self) -> SpanContext:
        """The processor asks whether it is sampled."""
        return self._any


class Exporter(OTLPSpanExporter):
    """Sends what has ended as OTLP messages."""

    def __init__(self, endpoint: str, resource: Mapping[str, object]) -> None:
        """Connects with the first export.

        Args:
            endpoint: URL of the collector; empty takes OpenTelemetry's variables.
            resource: Attributes of the process.
        """
        super().__init__(endpoint=endpoint or None)
        self._resource = ResourceMessage(attributes=list(plain_attributes(resource)))
        self._encoded: tuple[Sequence[ReadableSpan], ExportTraceServiceRequest] | None = None

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        """The message of a batch. A batch that is sent again is the same message."""
        if self._encoded is None or self._encoded[0] is not data:
            self._encoded = data, self._encode(data)
        return self._encoded[1]

    def _encode(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        spans = ScopeSpans(scope=SCOPE)
        for at, finished in enumerate(data, 1):
            if isinstance(finished, Finished):
                spans.MergeFromString(_made(finished))
            # Otherwise the thread that takes calls would wait for the interpreter until all are made.
            if not at % MADE_AT_ONCE:
                time.sleep(0)
        return ExportTraceServiceRequest(
            resource_spans=[ResourceSpans(resource=self._resource, scope_spans=[spans])]
        )


def _made(finished: Finished) -> bytes:
    """The spans of what has ended, as a serialized `ScopeSpans`. A fault costs these spans and no others."""
    try:
        return b"".join([part for span in finished.make_spans() for part in field(SPANS, [span])])
    except Exception:
        log.exception("spans could not be made")
        return b""


class Pipeline:
    """The way of spans out of one process. Has a thread, so that it is made after the last fork."""

    def __init__(self, endpoint: str, role: str = "") -> None:
        """Starts the thread. A collector that cannot be reached is reported in the log.

        Args:
            endpoint: URL of the collector; empty takes OpenTelemetry's variables.
            role: Tells the processes of one service apart, such as http.
        """
        defaults = {"service.name": NAME, "service.version": VERSION}
        given = Resource.create().attributes  # the SDK calls a service without a name unknown_service
        own = {"process.pid": os.getpid(), **({"attention.process": role} if role else {})}
        named = {key: value for key, value in given.items() if not str(value).startswith("unknown_service")}
        self._exporter = Exporter(endpoint, {**defaults, **named, **own})
        self._processor = BatchSpanProcessor(self._exporter)

    def add(self, spans: Callable[[], Iterable[bytes]]) -> None:
        """Queues what has ended. Never waits: if the queue is full, the oldest is dropped."""
        self._processor.on_end(Finished(spans))

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Sends what is queued; gives up after a time. May be called more than once.

        Args:
            seconds: How long that may take.
        """
        # The processor's own limit is 30 seconds.
        closing = threading.Thread(target=self._processor.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(seconds)
        if closing.is_alive():
            log.warning("traces lost: the collector did not take them in time", extra={"seconds": seconds})
            self._exporter.shutdown()
            # A thread that is still inside gRPC can hold up the end of the interpreter.
            closing.join(CANCEL_SECONDS)
