"""Options of listening, and of what is accepted from the network."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, Field, PositiveInt

from attention_serving.server.engine.limits import MIB
from attention_serving.server.settings.units import Port, Seconds


class Network(BaseModel):
    """Where the server listens, and how much it accepts from the network."""

    host: str = Field(
        "127.0.0.1", description="Address or host name to listen on, for gRPC, metrics and HTTP."
    )
    port: Port = Field(8001, description="Port for gRPC, 0 to 65535. 0 selects a free port.")
    unix_socket: Path | None = Field(
        None,
        description="Path of a Unix domain socket to listen on too, for clients on this machine. Needs a"
        " single worker. Who may write to the file may connect.",
    )
    metrics_port: Port = Field(
        8002, description="Port for Prometheus metrics, 0 to 65535. 0 selects a free port."
    )
    http_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port for the Open Inference Protocol over HTTP, 0 to 65535, usually 8000. 0 selects a"
        " free port. HTTP is off without it.",
    )
    http_explore: bool = Field(
        default=False,
        description="Serve a page at /explore of the HTTP port that draws the attention weights of texts."
        " Whoever opens it needs the same rights as any other client.",
    )
    max_message_bytes: Annotated[ByteSize, Field(ge=MIB, le=2047 * MIB)] = Field(
        ByteSize(64 * MIB), description="Maximum size of one message, sent or received, 1MiB to 2047MiB."
    )
    max_concurrent_calls: PositiveInt = Field(
        256,
        description="Maximum number of inference calls in progress, at least 1. Further calls are refused.",
    )
    max_streams: PositiveInt = Field(
        128, description="Maximum number of open streams, at least 1. Further streams are refused."
    )
    stream_window: PositiveInt = Field(
        32, description="Maximum number of unanswered requests on one stream, at least 1."
    )
    max_waiting_calls: PositiveInt = Field(
        4096,
        description="Maximum number of calls whose request has not arrived, at least 1; also of calls of"
        " health, metadata and reflection. Further calls are refused.",
    )
    max_calls_per_connection: int = Field(
        0,
        ge=0,
        le=2**31 - 1,
        description="Maximum number of calls in progress on one connection, 0 to 2147483647. Further calls"
        " wait in the client. 0 takes the value of max_concurrent_calls, or 100 if that is less.",
    )
    max_connections: int = Field(
        1024,
        ge=1,
        le=2**31 - 1,
        description="Maximum number of connections, 1 to 2147483647. Further connections are closed.",
    )
    send_timeout_seconds: Seconds = Field(
        30.0,
        description="How long a reply may wait for the client to read it, in seconds, 0 to 1000000. After"
        " that the call is cut off. 0 sets no limit.",
    )
    receive_timeout_seconds: Seconds = Field(
        20.0,
        description="How long the request of a call may take to arrive, in seconds, 0 to 1000000. 0 sets no"
        " limit. Raise it for large requests over slow networks.",
    )
    stream_idle_seconds: Seconds = Field(
        300.0,
        description="How long an open stream may wait for its next request, in seconds, 0 to 1000000. 0 sets"
        " no limit.",
    )
    connection_idle_seconds: Seconds = Field(
        7200.0,
        description="How long a connection may be without calls, in seconds, 0 to 1000000. After that it is"
        " closed. 0 sets no limit.",
    )
    connection_age_seconds: Seconds = Field(
        0.0,
        description="How long a connection may be open, in seconds, 0 to 1000000; clients then connect"
        " again. Varies by a tenth. 0 sets no limit.",
    )
    connection_age_grace_seconds: Seconds = Field(
        60.0,
        description="How long calls may go on when the age of their connection is reached, in seconds, 0 to"
        " 1000000. 0 sets no limit.",
    )
    keepalive_seconds: Seconds = Field(
        60.0,
        description="How long a connection may be silent before the server checks that the client is alive,"
        " in seconds, 0 to 1000000. 0 disables the check.",
    )
    allow_shared_memory: bool = Field(
        default=False,
        description="Let clients on this machine pass tensors in system shared memory. They can then make the"
        " server read and write every file in /dev/shm of the user that it runs as. Needs a single worker.",
    )
    transport: Literal["completion-queue", "threaded"] = Field(
        "completion-queue",
        description="How calls are received: completion-queue is fast and uses grpcio's internal API;"
        " threaded is slower and works with every release of grpcio.",
    )
