"""Creates the transport of a server, and expresses its settings and certificates in the terms of gRPC's core.

Source of the core's names and defaults: grpc/impl/channel_arg_names.h of grpc/grpc.
"""

from typing import Any

import grpc

from attention_serving.server.security.tls import Certificates, WatchedCertificates
from attention_serving.server.settings import Settings
from attention_serving.server.transport.call import Transport

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


def create_transport(settings: Settings) -> Transport:
    """Creates a transport that is neither bound nor started.

    Each adapter is imported only if it is chosen: the internal API that one of them needs may be missing
    in a newer grpcio.
    """
    options, timeout = channel_options(settings), settings.message_timeout_seconds
    if settings.transport == "threaded":
        from attention_serving.server.transport.threaded import ThreadedTransport  # noqa: PLC0415

        return ThreadedTransport(options, settings.max_concurrent_calls, timeout)
    from attention_serving.server.transport.completion_queue import CompletionQueueTransport  # noqa: PLC0415

    return CompletionQueueTransport(options, timeout)


def channel_options(settings: Settings) -> dict[str, int]:
    """The channel arguments of a server."""
    return {
        "grpc.max_receive_message_length": settings.max_message_bytes,
        # A second server on the port by mistake is an error; it must not take a share of the calls.
        "grpc.so_reuseport": int(settings.workers > 1),
        "grpc.server.max_pending_requests": MAX_PENDING_CALLS,
        "grpc.server.max_pending_requests_hard_limit": MAX_PENDING_CALLS,
        "grpc.max_concurrent_streams": max(settings.max_concurrent_calls, MIN_CALLS_PER_CONNECTION),
        # It would refuse calls of clients that keep to the limit, because the server's end of a call is
        # released after the client's.
        "grpc.http.overload_protection": 0,
        "grpc.max_metadata_size": METADATA_BYTES,
        "grpc.absolute_max_metadata_size": MAX_METADATA_BYTES,
        "grpc.max_allowed_incoming_connections": settings.max_connections,
        "grpc.max_connection_idle_ms": _milliseconds(settings.connection_idle_seconds),
        "grpc.max_connection_age_ms": _milliseconds(settings.connection_age_seconds),
        "grpc.max_connection_age_grace_ms": _milliseconds(CONNECTION_AGE_GRACE_SECONDS),
        "grpc.keepalive_time_ms": _milliseconds(settings.keepalive_seconds),
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
