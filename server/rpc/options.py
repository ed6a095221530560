"""Where a server listens, and how much it takes from the network."""

from dataclasses import dataclass
from pathlib import Path

from attention_serving.server.rpc.transport import TransportKind


@dataclass(frozen=True, kw_only=True)
class RpcOptions:
    """Where the server listens, and how much it takes. `server.rpc.admission` explains the limits of calls.

    Attributes:
        host: Address to listen on; IPv6 with or without brackets.
        port: Port to listen on; 0 lets the operating system choose.
        unix_socket: Path of a Unix domain socket to listen on too.
        max_message_bytes: Largest message, received or sent.
        max_concurrent_calls: Calls of inference that are open at a time; more are refused with
            RESOURCE_EXHAUSTED.
        max_streams: Streams among them.
        stream_window: Requests of one stream that may be without a sent reply; no more are received.
        max_waiting_calls: Calls of inference whose message has not arrived; and calls of other methods.
        max_calls_per_connection: Calls of one connection; further ones wait in the client. 0 takes
            max_concurrent_calls, or 100 if that is less.
        max_connections: Connections on each address of the host; further ones are closed.
        send_timeout_seconds: How long what is sent may wait for the caller to read it. 0 sets no limit.
        receive_timeout_seconds: How long the first message of a call may take. 0 sets no limit.
        stream_idle_seconds: How long a stream may wait for its next message. 0 sets no limit.
        connection_idle_seconds: How long a connection may be without calls. 0 sets no limit.
        connection_age_seconds: How long a connection may be open, give or take a tenth. 0 sets no limit.
        connection_age_grace_seconds: How long calls may go on after that. 0 sets no limit.
        keepalive_seconds: How long a connection may be silent until the server sends a ping. 0 sends none.
        allow_shared_memory: Whether callers may register regions of system shared memory.
        identity_share: Part of each limit, and of the memory of requests, that one identity may hold while
            nobody else holds any, above 0 to 1. Has no effect without a guard.
        open_reflection: Whether everyone may use reflection. Has no effect without a guard.
        share_port: Whether other processes may listen on the same port and share its connections.
        transport: How calls are received.
    """

    host: str
    port: int
    max_message_bytes: int
    max_concurrent_calls: int
    max_streams: int
    stream_window: int
    unix_socket: Path | None = None
    max_waiting_calls: int = 4096
    max_calls_per_connection: int = 0
    max_connections: int = 1024
    send_timeout_seconds: float = 30
    receive_timeout_seconds: float = 20
    stream_idle_seconds: float = 300
    connection_idle_seconds: float = 7200
    connection_age_seconds: float = 0
    connection_age_grace_seconds: float = 60
    keepalive_seconds: float = 60
    allow_shared_memory: bool = False
    identity_share: float = 0.8
    open_reflection: bool = False
    share_port: bool = False
    transport: TransportKind = TransportKind.COMPLETION_QUEUE
