"""The server's options: their names, types, ranges and defaults; and what is derived from them."""

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from attention_serving.artifact.names import NAME_PATTERN, check_aliases, is_model_name
from attention_serving.server import machine
from attention_serving.server.engine.limits import MAX_TOLERANCE, MIB, UNLIMITED, Limits, select_versions
from attention_serving.server.engine.run.provider import Device, Provider
from attention_serving.server.security.guard import Guard
from attention_serving.server.security.tls import TlsFiles
from attention_serving.server.security.token_file import parse_table
from attention_serving.server.threads import Reloaded, Watched, read_bytes, unreported

# Part of a message that is not tensor data: names, and the lengths of thousands of sequences.
HEADER_BYTES = MIB // 16
# How much more memory runs may take than is expected, before they fail.
ARENA_FACTOR = 1.25
# What options need in combination with others.
ONE_WORKER = "needs a single worker; set workers to 1"
NO_DEVICES = "0 is one worker for each GPU; set provider to cuda or auto"
NOT_EXPLICIT = "needs a single worker, because a load request reaches only one; set workers to 1, or use poll"
PAIR = "is needed with tls_certificate, and tls_certificate with it"
NO_PAIR = "needs tls_certificate and tls_key too"
NO_TOKENS = "needs identities; set tokens or jwt_jwks"
NO_ISSUER = "needs jwt_issuer and jwt_audience"
NO_MEMORY = "must be below max_memory"
NO_RUNS = "must leave a part of max_memory beside max_in_flight_bytes"
# A process that serves reports so every second.
MIN_TIMEOUT, SHORT = 2.0, "must be 0, or at least 2"
# How long the thread that receives calls stays awake after a run if latency matters most.
SPIN_SECONDS = 0.001

# How calls are received: see `server.transport`.
TransportKind: TypeAlias = Literal["completion-queue", "threaded"]
Port = Annotated[int, Field(ge=0, le=65535)]
# An upper bound, because gRPC's core counts milliseconds in 32 bits.
Seconds = Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)]


def read_aliases(value: Any) -> Any:
    """Names of models by alias, from NAME=MODEL separated by commas, or from a table.

    Raises:
        ValueError: An alias is invalid, occurs twice, or is that of an alias; or a model has no valid name.
    """
    if not isinstance(value, str | dict):
        return value
    pairs = (
        [*value.items()]
        if isinstance(value, dict)
        else [pair.strip().partition("=")[::2] for pair in value.split(",") if pair.strip()]
    )
    check_aliases([alias for alias, _ in pairs], [str(model) for _, model in pairs])
    for alias, model in pairs:
        if not is_model_name(str(model)):
            raise ValueError(f"{alias}={model}: the name of the model must match {NAME_PATTERN}")
    return dict(pairs)


class Section(BaseModel):
    """Options whose descriptions, for the help and the documentation, are the texts below them."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        """Makes one line of each description."""
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split())


class Models(Section):
    """Which models are served, and on what."""

    model_repository: Path
    """Folder that contains the artifacts as NAME/VERSION/."""
    provider: Literal["auto", "cpu", "cuda"] = "cpu"
    """Execution provider that runs the graphs: cpu; cuda, which refuses to start if it cannot be used;
    auto, which takes cuda if it can be used."""
    device_memory: Annotated[ByteSize, Field(ge=0)] = ByteSize(0)
    """Maximum memory of a CUDA device for runs, in addition to the weights of the models. 0 sets no limit."""
    model_control: Literal["none", "poll", "explicit"] = "none"
    """When models are loaded: none loads all at startup; poll also follows changes of the repository;
    explicit loads those of load_model, and more on request, and needs a single worker."""
    repository_poll_seconds: Annotated[float, Field(ge=0.1, le=1_000_000, allow_inf_nan=False)] = 15.0
    """How often the repository is polled with model_control poll, in seconds, 0.1 to 1000000."""
    load_model: str = ""
    """Models to load at startup with model_control explicit: names separated by commas, or * for all. Those
    that were loaded when the last server of the repository stopped are added."""
    alias: Annotated[dict[str, str], BeforeValidator(read_aliases)] = {}
    """Further names of models, as NAME=MODEL, separated by commas, or as a table in a TOML file; can be
    repeated. They take precedence over the aliases of artifacts, and a model's own name over both."""
    model_id: str = ""
    """Name or alias of the model that requests for texts use if they name none, and if it is of the kind that
    they need. Otherwise they use the only model of that kind that the caller may use."""
    version_policy: str = "all"
    """Versions of each model that are served: all, which keeps earlier versions loaded beside a new one;
    latest; latest:N, the N highest; or specific:V,V."""
    max_tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = MAX_TOLERANCE
    """Maximum tolerance, relative and absolute, that a model may state. Others are refused."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Threads for runs on the CPU, 0 to 1024. 0 uses one per available core."""
    latency: Literal["balanced", "lowest"] = "balanced"
    """What idle threads do: balanced lets them sleep; lowest keeps them awake between the operators of a run
    and for a millisecond after it, which answers a single caller sooner and uses more processor time."""
    canary_seconds: Seconds = 300.0
    """Time in which the golden vectors of every model are replayed once, in seconds, 0 to 1000000. A model
    that misses its tolerance is taken out of service. 0 replays them only when a model loads."""
    audit_fraction: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """Fraction of the sequences, 0 to 1, such as 0.001, that are run again alone at idle moments. A model
    whose results depend on the other sequences of a run is taken out of service. 0 audits none."""
    proof_public_key: Path | None = None
    """PEM file with Ed25519 public keys. Only models whose certificate one of them signed are loaded."""

    @field_validator("version_policy")
    @classmethod
    def _is_a_policy(cls, value: str) -> str:
        select_versions(value, ())
        return value


class Network(Section):
    """Where the server listens, and how much it accepts from the network."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address or host name to listen on, for gRPC, metrics and HTTP."""
    port: Port = 8001
    """Port for gRPC, 0 to 65535. 0 selects a free port."""
    unix_socket: Path | None = None
    """Path of a Unix domain socket to listen on too. Whoever can write to it can connect. One worker only."""
    metrics_port: Port = 8002
    """Port for Prometheus metrics, 0 to 65535. 0 selects a free port."""
    http_port: Annotated[int | None, Field(ge=0, le=65535)] = None
    """Port for HTTP, 0 to 65535, usually 8000. 0 selects a free port. HTTP is off without it."""
    http_explore: bool = False
    """Serve a page at /explore of the HTTP port that draws the attention weights of texts."""
    refuse_token_ids: bool = False
    """Refuse token ids in requests for embeddings over HTTP: clients such as LangChain's send those of
    OpenAI's tokenizer, which give wrong embeddings."""
    max_message_bytes: Annotated[ByteSize, Field(ge=MIB, le=2047 * MIB)] = ByteSize(64 * MIB)
    """Maximum size of one message, sent or received, 1MiB to 2047MiB."""
    max_concurrent_calls: PositiveInt = 256
    """Maximum number of inference calls in progress, at least 1. Further calls are refused."""
    max_connections: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1024
    """Maximum number of connections, 1 to 2147483647. Beyond it, gRPC closes the new one,
    HTTP the one that has waited longest."""
    message_timeout_seconds: Seconds = 30.0
    """Time for a request to arrive and for a reply to be read, in seconds, 0 to 1000000. 0 sets no limit."""
    connection_age_seconds: Seconds = 0.0
    """Maximum age of a connection, give or take a tenth, in seconds, 0 to 1000000. 0 sets no limit."""
    allow_shared_memory: bool = False
    """Let clients on this machine pass tensors in system shared memory. They can then make the server read
    and write every file in /dev/shm of the user that it runs as. Needs a single worker."""
    transport: TransportKind = "completion-queue"
    """How calls are received: completion-queue is fast and uses grpcio's internal API; threaded is slower and
    works with every release of grpcio."""

    # Limits that are not options: `server.api.admission` explains them.
    stream_window: ClassVar[int] = 32
    max_waiting_calls: ClassVar[int] = 4096
    stream_idle_seconds: ClassVar[float] = 300
    connection_idle_seconds: ClassVar[float] = 7200
    keepalive_seconds: ClassVar[float] = 60

    @property
    def max_streams(self) -> int:
        """Maximum number of ordered streams among the calls in progress."""
        return max(1, self.max_concurrent_calls // 2)


class Security(Section):
    """How connections are encrypted, and which clients may connect."""

    tls_certificate: Path | None = None
    """PEM file of the server's certificate and the authorities between it and the root, for gRPC, HTTP and
    metrics. A renewed file is taken without a restart."""
    tls_key: Path | None = None
    """PEM file of the private key of tls_certificate, without a passphrase."""
    tls_client_ca: Path | None = None
    """PEM file of authorities. Clients must then show a certificate of one of them (mutual TLS). Needs
    tls_certificate."""
    insecure: bool = False
    """Allow listening on a public address without encryption, such as behind a proxy that encrypts."""

    @property
    def tls_files(self) -> TlsFiles | None:
        """The files of the server's certificate; None without TLS."""
        if self.tls_certificate is None or self.tls_key is None:
            return None
        return TlsFiles(certificate=self.tls_certificate, key=self.tls_key, client_ca=self.tls_client_ca)


class IdentityAndRights(Section):
    """Who may do what. With neither tokens nor jwt_jwks, everyone may do everything."""

    tokens: Path | None = None
    """File of tokens and client certificates and their rights: JSON, or TOML if it ends with .toml. It is
    read again when it changes. python -m server.tokens makes it."""
    jwt_issuer: str = ""
    """Issuer of JSON Web Tokens: what the claim iss must be."""
    jwt_audience: str = ""
    """Audience of JSON Web Tokens: what the claim aud must be or contain."""
    jwt_jwks: str | None = None
    """Public keys that verify JSON Web Tokens: a JWK set, as a file or a URL that begins with https. Needs
    jwt_issuer and jwt_audience."""
    jwt_rights_claim: Annotated[str, Field(min_length=1)] = "scope"
    """Claim of JSON Web Tokens with the rights: a text with spaces between them, or an array."""
    protect_metrics: bool = False
    """Require a token with the right read for metrics; otherwise everyone may read them."""

    def guard(self, reloaded: Reloaded = unreported) -> Guard | None:
        """The guard that they ask for, or None if everyone may do everything.

        Args:
            reloaded: Called when tokens or keys have changed.

        Raises:
            ServerError: The tokens file or the keys cannot be used.
        """
        table = web_tokens = None
        if self.jwt_jwks:
            # Their libraries take time and memory that a server without them need not spend.
            from attention_serving.server.security.web_tokens import Keys, WebTokens  # noqa: PLC0415

            keys, claim = Keys(self.jwt_jwks, reloaded), self.jwt_rights_claim
            web_tokens = WebTokens(
                keys, issuer=self.jwt_issuer, audience=self.jwt_audience, rights_claim=claim
            )
        if path := self.tokens:
            table = Watched("tokens", partial(read_bytes, path), partial(parse_table, path), reloaded).start()
        return Guard(table, web_tokens) if self.has_identities else None

    @property
    def has_identities(self) -> bool:
        """Whether callers have to say who they are."""
        return self.tokens is not None or bool(self.jwt_jwks)


class Requests(Section):
    """How large requests and batches may be, and how much memory they may occupy."""

    max_sequence_length: PositiveInt = 8192
    """Maximum number of rows in one sequence, at least 1."""
    max_memory: Annotated[ByteSize, Field(ge=0)] = ByteSize(0)
    """Maximum memory for requests and runs, in addition to the loaded models, at least 0. 0 uses half of the
    memory of the machine or container, divided by the number of workers."""
    max_in_flight_bytes: Annotated[ByteSize, Field(ge=0)] = ByteSize(0)
    """Part of max_memory for requests, from arrival until the reply is sent. 0 uses a quarter, at most 1GiB.
    Runs use what requests and stored contexts leave."""
    max_context_bytes: Annotated[ByteSize, Field(ge=0)] | None = None
    """Part of max_memory for stored contexts, at least 0. By default a quarter; 0 switches them off."""
    context_folder: Path | None = None
    """Folder in which stored contexts are kept across restarts and evictions, up to four times
    max_context_bytes, 32KiB counted for each. Servers with the same models may share it: a drop removes the
    file, and no copy in the memory of another process."""
    max_batch_sequences: PositiveInt | None = None
    """Maximum number of sequences in one batch, at least 1. By default 64 on the CPU and 4096 on CUDA, where
    max_batch_tokens bounds it first."""
    max_batch_tokens: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of tokens in one batch of several sequences, at least 0: rows, padding included; of
    cross-attention, those of queries and keys. 0 sets no limit. By default 16384 on CUDA and no limit on the
    CPU."""


class Process(Section):
    """How many processes serve, how they stop, and what they log."""

    workers: Annotated[int, Field(ge=0, le=1024)] = 1
    """Number of server processes that share the port, 1 to 1024. 0 starts one for each GPU (needs provider
    cuda, or auto, which starts one process if CUDA cannot be used). Workers use the GPUs in turn. Every limit
    applies to each process, and so do calls that put, list or drop stored contexts."""
    worker_timeout_seconds: Annotated[NonNegativeFloat, Field(allow_inf_nan=False)] = 30.0
    """How long a worker process or the HTTP process may fail to report that it serves before it is killed and
    replaced, in seconds, at least 2. 0 disables the check."""
    grace_seconds: Seconds = 30.0
    """How long calls may take to finish during shutdown, in seconds, 0 to 1000000. 0 cancels them at once."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Minimum level of logged events: DEBUG, INFO, WARNING or ERROR."""
    log_format: Literal["text", "json"] = "text"
    """Format of the log: key=value pairs or one JSON object per line."""


class Observability(Section):
    """Which requests have a line in the log. OpenTelemetry's variables say which are traced."""

    log_requests: Literal["all", "failed", "none"] = "none"
    """Requests that have a line in the log, with their size, stages and code, whatever log_level is."""


class Settings(Models, Network, Security, IdentityAndRights, Requests, Process, Observability):
    """Every option of the server. `command_line` reads them from flags, environment and file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="after")
    def _are_consistent(self) -> Self:
        several = self.workers != 1
        rules = (
            ("workers", self.workers == 0 and self.provider == "cpu", NO_DEVICES),
            ("unix_socket", self.unix_socket and several, ONE_WORKER),
            ("allow_shared_memory", self.allow_shared_memory and several, ONE_WORKER),
            ("model_control", self.model_control == "explicit" and several, NOT_EXPLICIT),
            ("http_explore", self.http_explore and self.http_port is None, "needs HTTP; set http_port"),
            ("tls_key", (self.tls_key is None) != (self.tls_certificate is None), PAIR),
            ("tls_client_ca", self.tls_client_ca and not self.tls_certificate, NO_PAIR),
            ("worker_timeout_seconds", 0 < self.worker_timeout_seconds < MIN_TIMEOUT, SHORT),
            ("protect_metrics", self.protect_metrics and not (self.tokens or self.jwt_jwks), NO_TOKENS),
            ("jwt_jwks", self.jwt_jwks and not (self.jwt_issuer and self.jwt_audience), NO_ISSUER),
            ("max_in_flight_bytes", 0 < self.max_memory <= self.max_in_flight_bytes, NO_MEMORY),
            ("max_context_bytes", self.max_context_bytes and self.memory_for_runs <= 0, NO_RUNS),
        )
        problems = [
            InitErrorDetails(type=PydanticCustomError("rule", rule), loc=(name,), input=getattr(self, name))
            for name, is_broken, rule in rules
            if is_broken
        ]
        if problems:
            raise ValidationError.from_exception_data("Settings", problems)
        return self

    @property
    def _memory(self) -> int:
        share = machine.available_bytes() // (2 * max(1, self.workers))
        return self.max_memory or max(share, 2 * (self.max_in_flight_bytes + (self.max_context_bytes or 0)))

    @property
    def memory_for_requests(self) -> int:
        """Bytes that requests may hold."""
        return self.max_in_flight_bytes or min(self._memory // 4, 1024 * MIB)

    @property
    def memory_for_runs(self) -> int:
        """Bytes that runs may take, as expected from their shapes."""
        return self._memory - self.memory_for_requests - self.memory_for_contexts

    @property
    def memory_for_contexts(self) -> int:
        """Bytes that stored contexts may take."""
        if self.max_context_bytes is not None:
            return self.max_context_bytes
        return min(self._memory // 4, (self._memory - self.memory_for_requests) // 2)

    @property
    def device(self) -> Device:
        """Where graphs run.

        Raises:
            ValueError: The provider is auto: `server.process.application.resolve` has not chosen one yet.
        """
        return Device(
            Provider(self.provider),
            self.threads or machine.available_cores(),
            spins=self.latency == "lowest",
            # Beyond what is expected: a bound that holds if an estimate is wrong.
            arena_bytes=int(ARENA_FACTOR * self.memory_for_runs),
            memory_bytes=self.device_memory,
        )

    @property
    def spin_seconds(self) -> float:
        """How long the thread that receives calls stays awake after a run; 0 if another core is lacking."""
        return SPIN_SECONDS if self.latency == "lowest" and self.device.threads > 1 else 0.0

    @property
    def limits(self) -> Limits:
        """What the engine may hold."""
        on_device = self.provider != "cpu" and self.device_memory > 0
        defaults = (Provider.CUDA if self.provider == "cuda" else Provider.CPU).runtime.limits
        max_rows = defaults.max_batch_rows if self.max_batch_tokens is None else self.max_batch_tokens
        return Limits(
            max_sequence_length=self.max_sequence_length,
            max_input_bytes=self.max_message_bytes,
            max_result_bytes=self.max_message_bytes - HEADER_BYTES,
            max_run_bytes=int(self.device_memory) if on_device else self.memory_for_runs,
            max_in_flight_bytes=self.memory_for_requests,
            max_context_bytes=self.memory_for_contexts,
            max_batch_sequences=self.max_batch_sequences or defaults.max_batch_sequences,
            max_batch_rows=max_rows or UNLIMITED,
            max_batch_bytes=defaults.max_batch_bytes,
        )


# The sections of the help, in its order, by their titles.
SECTIONS: dict[str, type[BaseModel]] = {
    re.sub("(?<=[a-z])(?=[A-Z])", " ", section.__name__).capitalize(): section
    for section in Settings.__bases__
    if issubclass(section, BaseModel)
}
