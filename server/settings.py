"""The server's options: their names, types, ranges and defaults."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from server import cores, memory
from server.engine.limits import MAX_TOLERANCE, MIB, Limits
from server.engine.provider import Device, Provider
from server.engine.version_policy import VersionPolicy

# Part of a message that is not tensor data: names, and the lengths of thousands of sequences.
HEADER_BYTES = MIB // 16
# How much more memory runs may take than is expected, before they fail.
ARENA_FACTOR = 1.25
# How long the thread that receives calls stays awake after a run if latency matters most.
AWAKE_SECONDS = 0.001
Port = Annotated[int, Field(ge=0, le=65535)]
# An upper bound, because the core counts milliseconds in 32 bits.
Seconds = Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)]
PositiveBytes = Annotated[ByteSize, Field(gt=0)]


class Models(BaseModel):
    """Which models are served, and on what."""

    model_repository: Path = Field(description="Folder that contains the artifacts as NAME/VERSION/.")
    provider: Provider = Field(Provider.CPU, description="Execution provider that runs the graphs.")
    model_control: Literal["none", "poll", "explicit"] = Field(
        "none",
        description="When models are loaded: none loads all of them at startup; poll also loads, replaces and"
        " unloads them when the repository changes; explicit loads those of load_model, and more on request.",
    )
    repository_poll_seconds: float = Field(
        15.0,
        ge=0.1,
        le=1_000_000,
        allow_inf_nan=False,
        description="How often the repository is looked at with model_control poll, in seconds, 0.1 to"
        " 1000000. A change is made when it was seen twice.",
    )
    load_model: str = Field(
        "",
        description="Models to load at startup with model_control explicit: names with commas between them,"
        " or * for all. Those that were loaded when the last server of the repository ended are added.",
    )
    version_policy: str = Field(
        "all",
        description="Versions of each model that are served: all, latest, latest:N (the N highest) or"
        " specific:V,V.",
    )
    max_tolerance: float = Field(
        MAX_TOLERANCE,
        ge=0,
        allow_inf_nan=False,
        description="Maximum tolerance, relative and absolute, that a model may state for its difference from"
        " eager PyTorch, at least 0. Models with a larger one are refused.",
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="Threads for runs on the CPU, 0 to 1024. A long run that is alone uses all of them; under"
        " load, each run uses one. 0 uses one thread per available core.",
    )
    latency: Literal["balanced", "lowest"] = Field(
        "balanced",
        description="What idle threads do: balanced lets them sleep; lowest keeps them awake for a"
        " millisecond, in a run and between requests, which answers a single caller sooner and uses more"
        " processor time.",
    )

    @field_validator("version_policy")
    @classmethod
    def _is_a_policy(cls, value: str) -> str:
        VersionPolicy.parse(value)
        return value


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


class RequestLimits(BaseModel):
    """How large requests may be, and how much memory they may occupy."""

    max_sequence_length: PositiveInt = Field(
        8192, description="Maximum number of rows in one sequence, at least 1."
    )
    max_sequences: PositiveInt = Field(
        4096, description="Maximum number of sequences in one request, at least 1."
    )
    max_text_bytes: PositiveBytes = Field(
        ByteSize(MIB), description="Maximum size of one text in UTF-8, in bytes, above 0."
    )
    max_memory: Annotated[ByteSize, Field(ge=0)] = Field(
        ByteSize(0),
        description="Maximum memory for requests and runs, beside the loaded models, at least 0."
        " 0 uses half of the memory of the machine or container, divided by the number of workers.",
    )
    max_in_flight_bytes: Annotated[ByteSize, Field(ge=0)] = Field(
        ByteSize(0),
        description="Part of max_memory for requests, from arrival until the reply is sent, below max_memory."
        " 0 uses a quarter of max_memory, at most 1GiB. Runs use the rest.",
    )

    @field_validator("max_in_flight_bytes")
    @classmethod
    def _leaves_memory_for_runs(cls, value: ByteSize, info: ValidationInfo) -> ByteSize:
        total = info.data.get("max_memory")
        if total and value >= total:
            raise ValueError(f"must be below max_memory, which is {total} bytes")
        return value


class Batching(BaseModel):
    """How requests are combined into batches."""

    max_batch_sequences: PositiveInt = Field(
        64, description="Maximum number of sequences in one batch, at least 1."
    )
    max_batch_bytes: PositiveBytes = Field(
        ByteSize(256 * MIB), description="Maximum memory for a batch of two or more sequences, above 0."
    )
    batch_delay_seconds: NonNegativeFloat = Field(
        0.0,
        allow_inf_nan=False,
        description="Maximum batching delay, in seconds, at least 0. 0 adds no delay.",
    )


class Process(BaseModel):
    """How many processes serve, how they stop, and what they log."""

    workers: int = Field(
        1,
        ge=1,
        le=1024,
        description="Number of server processes that share the port, 1 to 1024."
        " Every limit applies to each process.",
    )
    worker_timeout_seconds: NonNegativeFloat = Field(
        30.0,
        allow_inf_nan=False,
        description="How long a worker process may fail to answer the supervisor before it is killed and"
        " replaced, in seconds, at least 0. 0 disables the check.",
    )
    grace_seconds: NonNegativeFloat = Field(
        30.0,
        description="How long calls in progress may take to finish during shutdown, in seconds,"
        " at least 0. 0 cancels them at once. A process that has not ended a few seconds later is killed.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Minimum level of logged events: DEBUG (logs every call), INFO, WARNING or ERROR."
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="Format of the log: key=value pairs or one JSON object per line."
    )


class Settings(Models, Network, RequestLimits, Batching, Process):
    """Every option of the server. `server.command_line` reads them from flags, environment and file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("unix_socket", "allow_shared_memory")
    @classmethod
    def _belongs_to_one_process(cls, value: object, info: ValidationInfo) -> object:
        if value and info.data.get("workers", 1) > 1:
            raise ValueError("needs a single worker; set workers to 1")
        return value

    @property
    def _memory(self) -> int:
        share = memory.available_bytes() // (2 * self.workers)
        return self.max_memory or max(share, 2 * self.max_in_flight_bytes)

    @property
    def memory_for_requests(self) -> int:
        """Bytes that requests may hold."""
        return self.max_in_flight_bytes or min(self._memory // 4, 1024 * MIB)

    @property
    def memory_for_runs(self) -> int:
        """Bytes that runs may take, as expected from their shapes."""
        return self._memory - self.memory_for_requests

    @property
    def device(self) -> Device:
        """Where graphs run."""
        return Device(
            self.provider,
            self.threads or cores.available(),
            spins=self.latency == "lowest",
            # Beyond what is expected: a bound that holds if an estimate is wrong.
            arena_bytes=int(ARENA_FACTOR * self.memory_for_runs),
        )

    @property
    def awake_seconds(self) -> float:
        """How long the thread that receives calls stays awake after a run; 0 if another core is lacking."""
        return AWAKE_SECONDS if self.latency == "lowest" and self.device.threads > 1 else 0.0

    @property
    def limits(self) -> Limits:
        """What the engine may hold."""
        return Limits(
            max_sequence_length=self.max_sequence_length,
            max_sequences=self.max_sequences,
            max_text_bytes=self.max_text_bytes,
            max_input_bytes=self.max_message_bytes,
            max_result_bytes=self.max_message_bytes - HEADER_BYTES,
            max_run_bytes=self.memory_for_runs,
            max_in_flight_bytes=self.memory_for_requests,
            max_batch_sequences=self.max_batch_sequences,
            max_batch_bytes=self.max_batch_bytes,
            batch_delay_seconds=self.batch_delay_seconds,
        )


# The sections of the help, in its order.
SECTIONS: dict[str, type[BaseModel]] = {
    "Models": Models,
    "Network": Network,
    "Request limits": RequestLimits,
    "Batching": Batching,
    "Process": Process,
}
