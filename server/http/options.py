"""Where the HTTP process finds the gRPC server, and how much it takes from the network."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, PositiveInt

from attention_serving.server.addresses import address_of
from attention_serving.server.observe.request_log import TraceOptions, trace_options
from attention_serving.server.settings import Settings
from attention_serving.server.tls.files import TlsFiles

LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - addresses to replace
# Connections to each worker. The system distributes them at random, so that a few more find all workers.
CONNECTIONS_PER_WORKER, MAX_CONNECTIONS = 4, 1024


class HttpOptions(BaseModel):
    """What the HTTP process does. Options with a description are flags of `python -m server.http` too.

    Attributes:
        private_sockets: In place of the target, a Unix domain socket of each of its processes, which only
            this user can connect to. What is said about the clients is believed on these only.
        tls: Files of this process's certificate; None encrypts nothing.
        traces: How requests are traced; None if they are not.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str = Field(description="The gRPC server: HOST:PORT or unix:PATH.")
    private_sockets: tuple[str, ...] = ()
    tls: TlsFiles | None = None
    connections: int = Field(
        default=1,
        ge=1,
        le=MAX_CONNECTIONS,
        description="Connections to the gRPC server: one is enough for one process, workers share many.",
    )
    max_message_bytes: ByteSize = Field(
        default=ByteSize(64 << 20),
        gt=0,
        description="Maximum size of a body, decompressed, and of the message that it becomes.",
    )
    max_in_flight_bytes: ByteSize = Field(
        default=ByteSize(1 << 30),
        gt=0,
        description="Maximum memory of requests, from their arrival until the answers are sent.",
    )
    max_concurrent_requests: PositiveInt = Field(
        default=256,
        description="Maximum number of inference requests in progress. More are refused with 503.",
    )
    max_connections: PositiveInt = Field(
        default=1024,
        description="Maximum number of connections. A further one replaces the one idle longest.",
    )
    receive_timeout_seconds: float = Field(
        default=20, ge=0, description="How long a head, and then a body, may take to arrive. 0 sets no limit."
    )
    send_timeout_seconds: float = Field(
        default=30, ge=0, description="How long a client may take to read on, in seconds. 0 sets no limit."
    )
    grace_seconds: float = Field(
        default=30, ge=0, description="How long requests in progress may take at the end, in seconds."
    )
    authorize: bool = Field(
        default=False,
        description="Ask the gRPC server who may call before a large body is read: for a server with tokens.",
    )
    explore: bool = Field(
        default=False, description="Serve a page at /explore that draws the attention weights of texts."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Minimum level of events."
    )
    log_format: Literal["text", "json"] = Field(default="text", description="Format of the log.")
    log_requests: Literal["all", "failed", "none"] = Field(
        default="none", description="Requests that have a line in the log."
    )
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
        connections=min(MAX_CONNECTIONS, CONNECTIONS_PER_WORKER * settings.workers) if shares_port else 1,
        max_message_bytes=settings.max_message_bytes,
        max_in_flight_bytes=ByteSize(settings.memory_for_requests),
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
