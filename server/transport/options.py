"""Where a server listens, and how much it takes from the network; the same in terms of gRPC's core.

Source of the core's names and defaults: grpc/impl/channel_arg_names.h of grpc/grpc.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from attention_serving.server.security.tls import Certificates, WatchedCertificates
from attention_serving.server.transport import TransportKind

# Largest number that the core takes; for limits, none.
UNLIMITED = 2**31 - 1
# Calls that the core holds until the server takes them. By default, the core cancels some of them beyond
# 1,000, which no metric shows. Bounds the memory of a flood of calls that are opened and cancelled.
MAX_PENDING_CALLS = 32768
# HTTP/2 recommends to allow no fewer. Source: RFC 9113, section 6.5.2.
MIN_CALLS_PER_CONNECTION = 100
# How long a peer may take to acknowledge a ping. The core never starts the timeout of keepalive, but that of
# pings, which is a minute by default.
KEEPALIVE_TIMEOUT_SECONDS = 20
# How long calls may go on when the age of their connection is reached.
CONNECTION_AGE_GRACE_SECONDS = 60
# Clients may ping this often while they have no calls; the connection of one that does so more often ends.
MIN_PING_SECONDS = 10
MAX_PING_STRIKES = 2
# The core's own defaults: above the first size, headers are refused at random; above the second, always.
METADATA_BYTES, MAX_METADATA_BYTES = 8192, 16384


@dataclass(frozen=True, kw_only=True)
class RpcOptions:
    """Where the server listens, and how much it takes. `server.api.admission` explains the limits of calls.

    Attributes:
        host: Address to listen on; IPv6 with or without brackets.
        port: Port to listen on; 0 lets the operating system choose.
        unix_socket: Path of a Unix domain socket to listen on too.
        max_message_bytes: Largest message that is received. The engine bounds what is sent.
        max_concurrent_calls: Calls of inference that are open at a time; more are refused with
            RESOURCE_EXHAUSTED.
        max_streams: Streams among them.
        stream_window: Requests of one stream that may be without a sent reply; no more are received.
        max_waiting_calls: Calls of inference whose message has not arrived; and calls of other methods.
        max_connections: Connections on each address of the host; further ones are closed.
        message_timeout_seconds: How long the first message of a call may take, and how long what is sent may
            wait for the caller to read it. 0 sets no limit.
        stream_idle_seconds: How long a stream may wait for its next message. 0 sets no limit.
        connection_idle_seconds: How long a connection may be without calls. 0 sets no limit.
        connection_age_seconds: How long a connection may be open, give or take a tenth. 0 sets no limit.
        keepalive_seconds: How long a connection may be silent until the server sends a ping. 0 sends none.
        allow_shared_memory: Whether callers may register regions of system shared memory.
        share_port: Whether other processes may listen on the same port and share its connections.
        transport: How calls are received.
    """

    host: str
    port: int
    max_message_bytes: int
    max_concurrent_calls: int
    max_streams: int
    stream_window: int = 32
    unix_socket: Path | None = None
    max_waiting_calls: int = 4096
    max_connections: int = 1024
    message_timeout_seconds: float = 30
    stream_idle_seconds: float = 300
    connection_idle_seconds: float = 7200
    connection_age_seconds: float = 0
    keepalive_seconds: float = 60
    allow_shared_memory: bool = False
    share_port: bool = False
    transport: TransportKind = "completion-queue"


def channel_options(options: RpcOptions) -> dict[str, int]:
    """The channel arguments of a server: its options in terms of gRPC's core."""
    return {
        "grpc.max_receive_message_length": options.max_message_bytes,
        # A second server on the port by mistake is an error; it must not take a share of the calls.
        "grpc.so_reuseport": int(options.share_port),
        "grpc.server.max_pending_requests": MAX_PENDING_CALLS,
        "grpc.server.max_pending_requests_hard_limit": MAX_PENDING_CALLS,
        "grpc.max_concurrent_streams": max(options.max_concurrent_calls, MIN_CALLS_PER_CONNECTION),
        # It would refuse calls of clients that keep to the limit, because the server's end of a call is
        # released after the client's.
        "grpc.http.overload_protection": 0,
        "grpc.max_metadata_size": METADATA_BYTES,
        "grpc.absolute_max_metadata_size": MAX_METADATA_BYTES,
        "grpc.max_allowed_incoming_connections": options.max_connections,
        "grpc.max_connection_idle_ms": _milliseconds(options.connection_idle_seconds),
        "grpc.max_connection_age_ms": _milliseconds(options.connection_age_seconds),
        "grpc.max_connection_age_grace_ms": _milliseconds(CONNECTION_AGE_GRACE_SECONDS),
        "grpc.keepalive_time_ms": _milliseconds(options.keepalive_seconds),
        "grpc.keepalive_timeout_ms": 1000 * KEEPALIVE_TIMEOUT_SECONDS,
        "grpc.http2.ping_timeout_ms": 1000 * KEEPALIVE_TIMEOUT_SECONDS,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.min_ping_interval_without_data_ms": 1000 * MIN_PING_SECONDS,
        "grpc.http2.max_ping_strikes": MAX_PING_STRIKES,
    }


def _milliseconds(seconds: float) -> int:
    """The core's number for a time; 0 sets no limit."""
    return min(round(1000 * seconds), UNLIMITED) if seconds else UNLIMITED


def tls_credentials(certificates: WatchedCertificates) -> grpc.ServerCredentials:
    """Credentials of one listening address, whose handshakes use the certificates of that moment.

    Whether clients need a certificate is decided once, because it does not change.
    """
    used = certificates.value

    def renewed() -> Any:
        """None if nothing has changed. The core calls this before each handshake, on threads of its own."""
        nonlocal used
        latest = certificates.value
        if latest is used:
            return None
        used = latest
        return _configuration(latest)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used), renewed, require_client_authentication=used.contents.client_ca is not None
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    contents = certificates.contents
    pair = contents.key, contents.certificate
    return grpc.ssl_server_certificate_configuration([pair], contents.client_ca)
