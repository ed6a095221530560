"""Where the HTTP process finds the gRPC server, and how much it takes from the network."""

from dataclasses import dataclass
from typing import Literal

from server.addresses import address_of
from server.settings import Settings
from server.tracing.options import TraceOptions, trace_options

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
LogFormat = Literal["text", "json"]
LogRequests = Literal["all", "failed", "none"]
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - addresses to replace
# Connections to each worker. The system distributes them at random, so that a few more find all workers.
CONNECTIONS_PER_WORKER = 4


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """What the HTTP process does.

    Attributes:
        target: The gRPC server, as gRPC writes addresses: HOST:PORT or unix:PATH.
        connections: Connections to it. One is enough for one process; workers share many.
        max_message_bytes: Largest body, decompressed, and largest message to the gRPC server.
        max_in_flight_bytes: Memory of requests from their arrival until the answers are sent.
        max_concurrent_requests: Inference requests in progress; more are refused with 503.
        max_connections: Connections of clients; further ones are closed.
        receive_timeout_seconds: How long a head, and then a body, may take to arrive. 0 sets no limit.
        send_timeout_seconds: How long a client may take to read on. 0 sets no limit.
        grace_seconds: How long requests in progress may take when the process is to end.
        log_level: Minimum level of logged events.
        log_format: text or json.
        log_requests: Requests that have a line in the log: all, failed or none.
        traces: How requests are traced; None if they are not.
    """

    target: str
    connections: int = 1
    max_message_bytes: int = 64 << 20
    max_in_flight_bytes: int = 1 << 30
    max_concurrent_requests: int = 256
    max_connections: int = 1024
    receive_timeout_seconds: float = 20
    send_timeout_seconds: float = 30
    grace_seconds: float = 30
    log_level: LogLevel = "INFO"
    log_format: LogFormat = "text"
    log_requests: LogRequests = "none"
    traces: TraceOptions | None = None


def options_of(settings: Settings, port: int) -> HttpOptions:
    """The options of the HTTP process beside a server with the given settings.

    Args:
        settings: Settings of the server.
        port: The port on which it listens for gRPC.
    """
    return HttpOptions(
        target=_target(settings, port),
        connections=1 if settings.workers == 1 else CONNECTIONS_PER_WORKER * settings.workers,
        max_message_bytes=settings.max_message_bytes,
        max_in_flight_bytes=settings.memory_for_requests,
        max_concurrent_requests=settings.max_concurrent_calls * settings.workers,
        max_connections=settings.max_connections,
        receive_timeout_seconds=settings.receive_timeout_seconds,
        send_timeout_seconds=settings.send_timeout_seconds,
        grace_seconds=settings.grace_seconds,
        log_level=settings.log_level,
        log_format=settings.log_format,
        log_requests=settings.log_requests,
        traces=trace_options(
            settings.trace_endpoint,
            settings.trace_sample_ratio,
            host=settings.host,
            port=settings.http_port or 0,
        ),
    )


def _target(settings: Settings, port: int) -> str:
    if settings.unix_socket is not None:
        return f"unix:{settings.unix_socket.absolute()}"
    host = settings.host.strip("[]")
    return address_of(LOOPBACK.get(host, host), port)
