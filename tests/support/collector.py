"""A collector of traces: a real gRPC server of OpenTelemetry's protocol that keeps the spans it receives."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc

PATIENCE_SECONDS = 60
# Has the exporter send what has ended after a tenth of a second rather than after five seconds.
QUICKLY = {"OTEL_BSP_SCHEDULE_DELAY": "100"}


@dataclass(frozen=True)
class Seen:
    """A span as it arrived, with the identifiers in hexadecimal.

    Attributes:
        links: Trace and span that it is linked to.
        resource: Attributes of the process.
    """

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    is_error: bool
    has_remote_parent: bool
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    resource: dict[str, Any]

    @property
    def reference(self) -> tuple[str, str]:
        return self.trace_id, self.span_id


class Collector(pb_grpc.TraceServiceServicer):
    """Keeps the spans. `held` makes it wait before it answers."""

    def __init__(self) -> None:
        self.url = ""
        self.held: threading.Event | None = None
        self.exporting = threading.Event()
        self._spans: list[Seen] = []
        self._changed = threading.Condition()

    @property
    def spans(self) -> list[Seen]:
        with self._changed:
            return list(self._spans)

    def named(self, name: str) -> list[Seen]:
        return [span for span in self.spans if span.name == name]

    def Export(  # noqa: N802 - as the service calls it
        self,
        request: pb.ExportTraceServiceRequest,
        context: grpc.ServicerContext,  # noqa: ARG002
    ) -> pb.ExportTraceServiceResponse:
        """Takes spans."""
        self.exporting.set()
        if self.held is not None:
            self.held.wait(PATIENCE_SECONDS)
        with self._changed:
            self._spans += _seen(request)
            self._changed.notify_all()
        return pb.ExportTraceServiceResponse()

    def wait_for(self, name: str, count: int = 1) -> list[Seen]:
        """Waits until that many spans of a name have arrived; returns them."""
        with self._changed:
            is_enough = self._changed.wait_for(lambda: len(self.named(name)) >= count, PATIENCE_SECONDS)
            assert is_enough, [(span.name, span.attributes) for span in self._spans]
            return self.named(name)

    def children(self, parent: Seen) -> list[Seen]:
        """The spans below one, in the order of their beginnings."""
        found = [span for span in self.spans if (span.trace_id, span.parent_id) == parent.reference]
        return sorted(found, key=lambda span: span.start)


def _seen(request: pb.ExportTraceServiceRequest) -> Iterator[Seen]:
    for process in request.resource_spans:
        resource = _values(process.resource.attributes)
        for scope in process.scope_spans:
            for span in scope.spans:
                yield Seen(
                    name=span.name,
                    kind=span.kind,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                    is_error=span.status.code == span.status.STATUS_CODE_ERROR,
                    has_remote_parent=bool(span.flags & 0x200),
                    attributes=_values(span.attributes),
                    links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                    resource=resource,
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value") for each in attributes
    }


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector until the block ends."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        if collector.held is not None:
            collector.held.set()
        server.stop(None).wait()
