"""The options of a server in terms of gRPC's core: its channel arguments.

Source of names and defaults: grpc/impl/channel_arg_names.h of grpc/grpc.
"""

from attention_serving.server.rpc.options import RpcOptions

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
# Clients may ping this often while they have no calls; the connection of one that does so more often ends.
MIN_PING_SECONDS = 10
MAX_PING_STRIKES = 2
# The core's own defaults: above the first size, headers are refused at random; above the second, always.
METADATA_BYTES, MAX_METADATA_BYTES = 8192, 16384


def channel_options(options: RpcOptions) -> dict[str, int]:
    """The channel arguments of a server."""
    return {
        "grpc.max_receive_message_length": options.max_message_bytes,
        "grpc.max_send_message_length": options.max_message_bytes,
        # A second server on the port by mistake is an error; it must not take a share of the calls.
        "grpc.so_reuseport": int(options.share_port),
        **_calls(options),
        **_connections(options),
    }


def _calls(options: RpcOptions) -> dict[str, int]:
    return {
        "grpc.server.max_pending_requests": MAX_PENDING_CALLS,
        "grpc.server.max_pending_requests_hard_limit": MAX_PENDING_CALLS,
        "grpc.max_concurrent_streams": options.max_calls_per_connection
        or max(options.max_concurrent_calls, MIN_CALLS_PER_CONNECTION),
        # It would refuse calls of clients that keep to the limit, because the server's end of a call is
        # released after the client's.
        "grpc.http.overload_protection": 0,
        "grpc.max_metadata_size": METADATA_BYTES,
        "grpc.absolute_max_metadata_size": MAX_METADATA_BYTES,
    }


def _connections(options: RpcOptions) -> dict[str, int]:
    return {
        "grpc.max_allowed_incoming_connections": options.max_connections,
        "grpc.max_connection_idle_ms": _milliseconds(options.connection_idle_seconds),
        "grpc.max_connection_age_ms": _milliseconds(options.connection_age_seconds),
        "grpc.max_connection_age_grace_ms": _milliseconds(options.connection_age_grace_seconds),
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
