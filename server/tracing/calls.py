"""Traces of gRPC calls: which are sampled, and where their spans go."""

from functools import partial

from attention_serving.server.records import CallRecord, RequestRecord
from attention_serving.server.tracing.context import Head
from attention_serving.server.tracing.export import Pipeline
from attention_serving.server.tracing.messages import Attributes
from attention_serving.server.tracing.options import TraceOptions
from attention_serving.server.tracing.spans import call_spans


class CallTracing:
    """Traces the calls of one process."""

    def __init__(self, options: TraceOptions) -> None:
        """Starts the exporter.

        Args:
            options: Where spans go, and which calls are sampled.
        """
        # The place of a new call in a trace; None if it has none. Asked of every call.
        self.begin = Head(options).begin
        self._pipeline = Pipeline(options.endpoint)
        self._server: Attributes = (
            ("rpc.system.name", "grpc"),
            ("server.address", options.host),
            ("server.port", options.port or ""),
        )

    def ended(self, call: CallRecord, request: RequestRecord | None) -> None:
        """Exports the spans of a call that is sampled, or of a request of it."""
        if call.trace is not None and call.trace.sampled:
            self._pipeline.add(partial(call_spans, call, request, self._server))

    def close(self) -> None:
        """Sends the last spans."""
        self._pipeline.close()
