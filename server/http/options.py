"""Where the HTTP process finds the gRPC server, and how much it takes from the network."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from attention_serving.server.addresses import address_of
from attention_serving.server.settings import Settings
from attention_serving.server.tls.files import TlsFiles
from attention_serving.server.tracing.options import TraceOptions, trace_options

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
        private_sockets: In place of that, a Unix domain socket of each of its processes, which only this user
            can connect to. What is said about the clients is believed on these only.
        tls: Files of the server's certificate; None encrypts nothing.
        connections: Connections to the target. One is enough for one process; workers share many.
        max_message_bytes: Largest body, decompressed, and largest message to the gRPC server.
        max_in_flight_bytes: Memory of requests from their arrival until the answers are sent.
        max_concurrent_requests: Inference requests in progress; more are refused with 503.
        max_connections: Connections of clients. A further one replaces the one that has waited for its client
            for the longest time, or is closed if all have requests in progress.
        receive_timeout_seconds: How long a head, and then a body, may take to arrive. 0 sets no limit.
        send_timeout_seconds: How long a client may take to read on. 0 sets no limit.
        grace_seconds: How long requests in progress may take when the process is to end.
        authorize: Whether it asks the gRPC server who may call before it reads a body that may be large.
        explore: Whether there is a page at /explore that draws attention weights.
        log_level: Minimum level of logged events.
        log_format: text or json.
        log_requests: Requests that have a line in the log: all, failed or none.
        traces: How requests are traced; None if they are not.
    """

    target: str
    private_sockets: tuple[str, ...] = ()
    tls: TlsFiles | None = None
    connections: int = 1
    max_message_bytes: int = 64 << 20
    max_in_flight_bytes: int = 1 << 30
    max_concurrent_requests: int = 256
    max_connections: int = 1024
    receive_timeout_seconds: float = 20
    send_timeout_seconds: float = 30
    grace_seconds: float = 30
    authorize: bool = False
    explore: bool = False
    log_level: LogLevel = "INFO"
    log_format: LogFormat = "text"
    log_requests: LogRequests = "none"
    traces: TraceOptions | None = None


def needs_private_sockets(settings: Settings) -> bool:
    """Whether the HTTP process reaches the gRPC server through sockets of its own.

    With TLS, it would otherwise need a certificate that the authorities of the clients have signed. With TLS
    or identities, the server could not tell its calls, which name the client that they are for, from others.
    """
    return settings.http_port is not None and (settings.tls_files is not None or settings.has_identities)


def options_of(settings: Settings, port: int, private_sockets: Sequence[Path] = ()) -> HttpOptions:
    """The options of the HTTP process beside a server with the given settings.

    Args:
        settings: Settings of the server.
        port: The port on which it listens for gRPC.
        private_sockets: The socket of each of its processes, if `needs_private_sockets`.
    """
    shares_port = settings.workers > 1 and not private_sockets
    return HttpOptions(
        target=_target(settings, port),
        private_sockets=tuple(f"unix:{path}" for path in private_sockets),
        tls=settings.tls_files,
        connections=CONNECTIONS_PER_WORKER * settings.workers if shares_port else 1,
        max_message_bytes=settings.max_message_bytes,
        max_in_flight_bytes=settings.memory_for_requests,
        max_concurrent_requests=settings.max_concurrent_calls * settings.workers,
        max_connections=settings.max_connections,
        receive_timeout_seconds=settings.receive_timeout_seconds,
        send_timeout_seconds=settings.send_timeout_seconds,
        grace_seconds=settings.grace_seconds,
        authorize=settings.has_identities,
        explore=settings.http_explore,
        log_level=settings.log_level,
        log_format=settings.log_format,
        log_requests=settings.log_requests,
        traces=trace_options(settings.trace_endpoint, host=settings.host, port=settings.http_port or 0),
    )


def _target(settings: Settings, port: int) -> str:
    if settings.unix_socket is not None:
        return f"unix:{settings.unix_socket.absolute()}"
    host = settings.host.strip("[]")
    return address_of(LOOPBACK.get(host, host), port)
