"""Exports spans with OTLP over gRPC: a bounded queue, and a thread that empties it.

Everything about the collector (its address, TLS, headers, compression, retries) and about the queue is
OpenTelemetry's SDK, with its environment variables. Only the messages are made here: see `messages`.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource as ResourceMessage
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_EXPORT_BATCH_SIZE, OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanContext, TraceFlags

from attention_serving.server import NAME, VERSION
from attention_serving.server.api.protobuf_bytes import field
from attention_serving.server.tracing.messages import plain_attributes

log = logging.getLogger(__name__)
# How long the last spans may take to reach the collector when the process ends.
CLOSE_SECONDS = 1.5
# How long a call to the collector may take to end once it was cancelled.
CANCEL_SECONDS = 1.0
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
RESOURCE_SPANS = (ExportTraceServiceRequest.RESOURCE_SPANS_FIELD_NUMBER,)
SCOPE_SPANS = (ResourceSpans.SCOPE_SPANS_FIELD_NUMBER,)
SCOPE = ScopeSpans(scope=InstrumentationScope(name=NAME, version=VERSION)).SerializeToString()
# Makes the spans of what has ended, as a serialized `ScopeSpans`.
Maker: TypeAlias = Callable[[], bytes]
# Calls whose spans are made one after the other: that takes half as long as after each call, when the
# processor's caches hold everything else.
GROUP = 16
# The specification's defaults of the two variables, for calls instead of spans.
QUEUED_CALLS, EXPORTED_CALLS = 2048, 512


class Group(ReadableSpan):
    """Up to `GROUP` calls or requests that have ended. The processor only queues it.

    Their spans are made together, by the thread that adds the last of them, or by the exporter's thread if it
    comes before.
    """

    _any = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def __init__(self, first: Maker) -> None:
        """Creates a group of one."""
        self._lock = threading.Lock()
        self._makers = [first]
        self._spans: bytes | None = None

    @property
    def context(self) -> SpanContext:
        """The processor asks whether it is sampled."""
        return self._any

    def add(self, make: Maker) -> bool:
        """Adds what has ended; returns False if the group takes no more."""
        with self._lock:
            if self._spans is not None:
                return False
            self._makers.append(make)
            if len(self._makers) >= GROUP:
                self._make()
        return True

    def spans(self) -> bytes:
        """The spans, as a serialized `ScopeSpans`. The group takes no more."""
        with self._lock:
            return self._make() if self._spans is None else self._spans

    def _make(self) -> bytes:
        makers, self._makers = self._makers, []
        self._spans = b"".join([_made(make) for make in makers])
        return self._spans


def _made(make: Maker) -> bytes:
    """The spans of what has ended. A fault costs these spans and no others."""
    try:
        return make()
    except Exception:
        log.exception("spans could not be made")
        return b""


class SerializedTraceService:
    """The stub of a collector, for messages that are serialized already."""

    def __init__(self, channel: grpc.Channel) -> None:
        """Takes a channel to the collector."""
        read = ExportTraceServiceResponse.FromString
        self.Export: Callable[..., object] = channel.unary_unary(EXPORT, response_deserializer=read)


class Exporter(OTLPSpanExporter):
    """Sends what has ended as OTLP messages."""

    def __init__(self, endpoint: str, resource: Mapping[str, object]) -> None:
        """Connects with the first export.

        Args:
            endpoint: URL of the collector; empty takes OpenTelemetry's variables.
            resource: Attributes of the process.
        """
        super().__init__(endpoint=endpoint or None)
        found = ResourceMessage(attributes=list(plain_attributes(resource)))
        self._resource = ResourceSpans(resource=found).SerializeToString()
        self._encoded: tuple[Sequence[ReadableSpan], bytes] | None = None

    def _initialize_channel_and_stub(self) -> None:
        super()._initialize_channel_and_stub()  # type: ignore[no-untyped-call]
        channel: Any = self._channel
        self._client: Any = SerializedTraceService(channel)

    def _translate_data(self, data: Sequence[ReadableSpan]) -> Any:
        """The message of a batch. A batch that is sent again is the same message."""
        if self._encoded is None or self._encoded[0] is not data:
            self._encoded = data, self._encode(data)
        return self._encoded[1]

    def _encode(self, data: Sequence[ReadableSpan]) -> bytes:
        spans = [group.spans() for group in data if isinstance(group, Group)]
        return b"".join(field(RESOURCE_SPANS, [self._resource, *field(SCOPE_SPANS, [SCOPE, *spans])]))


def _groups(variable: str, default: int) -> int:
    """A number of calls that a variable of OpenTelemetry states, as a number of groups."""
    given = os.environ.get(variable, "").strip() or str(default)
    if not given.isdecimal():
        log.warning("not a number, the default is used", extra={variable: given, "default": default})
        given = str(default)
    return max(1, int(given) // GROUP)


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
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=_groups(OTEL_BSP_MAX_QUEUE_SIZE, QUEUED_CALLS),
            max_export_batch_size=_groups(OTEL_BSP_MAX_EXPORT_BATCH_SIZE, EXPORTED_CALLS),
        )
        self._group: Group | None = None

    def add(self, make: Maker) -> None:
        """Queues what has ended. Never waits: if the queue is full, the oldest are dropped.

        Args:
            make: Makes the spans.
        """
        if self._group is None or not self._group.add(make):
            self._group = Group(make)
            self._processor.on_end(self._group)

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
