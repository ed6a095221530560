"""What is noted of one request over HTTP."""

import time

from starlette.types import Scope

from attention_serving.server import request_ids
from attention_serving.server.records import TraceContext
from attention_serving.server.tracing import context as trace_context


class HttpRecord:
    """One request.

    Attributes:
        request_id: As its client sent it, or made here.
        method: GET, HEAD or POST.
        route: The path, with names of parameters in braces.
        path: The path.
        scheme: http or https.
        trace: Its place in a trace; None if traces are off.
        arrived_at: When it arrived, on `time.monotonic`'s clock.
        arrived_ns: The same in nanoseconds since 1970.
        ended_at: When it was answered.
        status: The status of the answer; 499 if the client left before.
    """

    __slots__ = (
        "arrived_at",
        "arrived_ns",
        "ended_at",
        "method",
        "path",
        "request_id",
        "route",
        "scheme",
        "status",
        "trace",
    )

    def __init__(self, scope: Scope, route: str, request_id: str, trace: TraceContext | None) -> None:
        self.method, self.path, self.scheme = scope["method"], scope["path"], scope["scheme"]
        self.route, self.request_id, self.trace = route, request_id, trace
        self.arrived_at, self.arrived_ns = time.monotonic(), time.time_ns()
        self.ended_at, self.status = 0.0, 0

    def metadata(self) -> list[tuple[str, str]]:
        """What the gRPC server is told: the identifier, and the trace if traces are on."""
        traced = trace_context.headers(self.trace) if self.trace is not None else []
        return [(request_ids.KEY, self.request_id), *traced]
