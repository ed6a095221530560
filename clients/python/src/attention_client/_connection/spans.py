"""A span for each call, if the application traces: OpenTelemetry's API is used if it has been imported.

An application that sets a tracer provider has imported `opentelemetry.trace`. Without that, a call costs one
look-up in a dictionary. Names follow https://opentelemetry.io/docs/specs/semconv/rpc/grpc/.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import grpc

from attention_client.errors import AttentionClientError

_SERVICE = "attention.v1.AttentionService"
Pairs: TypeAlias = tuple[tuple[str, str], ...]


@contextmanager
def span_of(method: str, targets: Sequence[str]) -> Iterator[Pairs]:
    """The span of one call, a child of the current one; it ends with the block.

    Args:
        method: The method's name.
        targets: The servers.

    Yields:
        The metadata that passes the span on to the server; empty if the application has set no provider.
    """
    trace = sys.modules.get("opentelemetry.trace")
    # The default provider does nothing.
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        yield ()
        return
    from opentelemetry import propagate  # noqa: PLC0415 - present, because its package is

    name, target = f"{_SERVICE}/{method}", targets[0]
    attributes: dict[str, str | int] = {
        "rpc.system.name": "grpc",
        "rpc.method": name,
        "server.address": target,
    }
    host, _, port = target.rpartition(":")
    if host and port.isdecimal():
        attributes |= {"server.address": host.strip("[]"), "server.port": int(port)}
    tracer = trace.get_tracer("attention_client")
    span = tracer.start_span(name, kind=trace.SpanKind.CLIENT, attributes=attributes)
    carrier: dict[str, str] = {}
    propagate.inject(carrier, trace.set_span_in_context(span))
    code = grpc.StatusCode.CANCELLED
    try:
        yield tuple(carrier.items())
        code = grpc.StatusCode.OK
    except AttentionClientError as error:
        code = error.code or grpc.StatusCode.UNKNOWN
        raise
    finally:
        span.set_attribute("rpc.response.status_code", code.name)
        if code is not grpc.StatusCode.OK:
            span.set_attribute("error.type", code.name)
            span.set_status(trace.StatusCode.ERROR)
        span.end()
