"""A span for each call, if the application traces: OpenTelemetry's API is used if it has been imported.

An application that sets a tracer provider has imported `opentelemetry.trace`. Without that, a call costs one
look-up in a dictionary. Names follow https://opentelemetry.io/docs/specs/semconv/rpc/grpc/.
"""

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias

import grpc

from attention_client.errors import AttentionClientError

_SERVICE = "attention.v1.AttentionService"
Pairs: TypeAlias = tuple[tuple[str, str], ...]


class CallSpan:
    """The span of one call; a context manager that ends with the block.

    Attributes:
        metadata: What passes the span on to the server.
    """

    def __init__(self, method: str, targets: Sequence[str], trace: Any, provider: Any) -> None:
        """Starts the span as a child of the current one.

        Args:
            method: The method's name.
            targets: The servers.
            trace: The module `opentelemetry.trace`.
            provider: The application's tracer provider.
        """
        from opentelemetry import propagate  # noqa: PLC0415 - present, because its package is

        name = f"{_SERVICE}/{method}"
        self._trace = trace
        self._ended = False
        self._span = provider.get_tracer("attention_client").start_span(
            name,
            kind=trace.SpanKind.CLIENT,
            attributes={"rpc.system.name": "grpc", "rpc.method": name, **_address(targets[0])},
        )
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(self._span))
        self.metadata: Pairs = tuple(carrier.items())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, AttentionClientError):
            self.end(error.code or grpc.StatusCode.UNKNOWN)
        else:
            self.end(grpc.StatusCode.OK if error is None else grpc.StatusCode.CANCELLED)

    def end(self, code: grpc.StatusCode | None) -> None:
        """Ends the span with the code of its call; None if it is not known. Only the first call counts."""
        if self._ended:
            return
        self._ended = True
        name = (code or grpc.StatusCode.UNKNOWN).name
        self._span.set_attribute("rpc.response.status_code", name)
        if code is not grpc.StatusCode.OK:
            self._span.set_attribute("error.type", name)
            self._span.set_status(self._trace.StatusCode.ERROR)
        self._span.end()


def start_span(request: str, targets: Sequence[str]) -> CallSpan | None:
    """The span of a new call; None if the application has set no tracer provider.

    Args:
        request: Name of the request's message, such as AttendRequest.
        targets: The servers.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):  # the default, which does nothing
        return None
    return CallSpan(request.removesuffix("Request"), targets, trace, provider)


def _address(target: str) -> dict[str, str | int]:
    """The server's address, and its port if the target states one."""
    host, separator, port = target.rpartition(":")
    if separator and port.isdecimal():
        return {"server.address": host.strip("[]"), "server.port": int(port)}
    return {"server.address": target}
