"""Every option of the server: as a flag, an environment variable, or a line of a TOML file."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from server import cores
from server.engine.limits import MIB, Limits
from server.engine.provider import Device, Provider
from server.rpc.server import RpcOptions
from server.rpc.transport import TransportKind

ENV_PREFIX = "ATTENTION_"
CONFIG_VARIABLE = f"{ENV_PREFIX}CONFIG"

# Room in a message beside its tensors: names, and the lengths of thousands of sequences.
HEADER_BYTES = MIB // 16
Port = Annotated[int, Field(ge=0, le=65535)]


class Settings(BaseSettings):
    """Serve the models of a repository over gRPC.

    Flags win over environment variables (ATTENTION_PORT for --port), and those over the TOML file that
    ATTENTION_CONFIG names (port = 8001).
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        cli_kebab_case=True,
        cli_prog_name="python -m server",
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_implicit_flags=True,
    )

    model_repository: Path = Field(description="folder of <model name>/<version>/ artifacts")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: Port = Field(8001, description="gRPC port; 0 lets the system choose")
    metrics_port: Port = Field(8002, description="Prometheus port; 0 lets the system choose")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="least level to log")
    provider: Literal["cpu", "cuda"] = Field("cpu", description="where graphs run")
    workers: PositiveInt = Field(1, description="server processes on the port; each has all the limits below")
    threads: NonNegativeInt = Field(0, description="threads of one run; 0 for one per available core")
    spin_microseconds: NonNegativeInt = Field(0, description="how long a run's threads wait awake for work")
    grace_seconds: NonNegativeFloat = Field(30.0, description="how long running calls may take at shutdown")
    max_message_bytes: int = Field(64 * MIB, ge=MIB, description="largest message in and out")
    max_concurrent_calls: PositiveInt = Field(256, description="calls held at a time; more are refused")
    max_streams: PositiveInt = Field(128, description="streams open at a time; more are refused")
    stream_window: PositiveInt = Field(32, description="requests of one stream on their way at a time")
    transport: Literal["completion-queue", "threaded"] = Field(
        "completion-queue",
        description="how calls are received: completion-queue is fast and uses grpcio's internal API; "
        "threaded is slower and works with every grpcio release",
    )
    max_sequence_length: PositiveInt = Field(8192, description="rows of one sequence")
    max_sequences: PositiveInt = Field(4096, description="sequences of one request")
    max_in_flight_bytes: PositiveInt = Field(1024 * MIB, description="memory of all requests being answered")
    max_batch_sequences: PositiveInt = Field(64, description="sequences of one run")
    batch_delay_seconds: NonNegativeFloat = Field(0.0, description="longest wait for company that may come")
    max_batch_bytes: PositiveInt = Field(256 * MIB, description="memory of a run of several sequences")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags and arguments, environment, file; in this order."""
        file = os.environ.get(CONFIG_VARIABLE)
        if not file:
            return init_settings, env_settings
        if not Path(file).is_file():
            raise SettingsError(f"{CONFIG_VARIABLE}={file}: there is no such file")
        try:
            return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, Path(file))
        except (OSError, ValueError) as error:
            raise SettingsError(f"{file}: {error}") from error

    @property
    def limits(self) -> Limits:
        """What the engine holds."""
        return Limits(
            max_sequence_length=self.max_sequence_length,
            max_sequences=self.max_sequences,
            max_result_bytes=self.max_message_bytes - HEADER_BYTES,
            max_in_flight_bytes=self.max_in_flight_bytes,
            max_batch_sequences=self.max_batch_sequences,
            max_batch_bytes=self.max_batch_bytes,
            batch_delay_seconds=self.batch_delay_seconds,
        )

    @property
    def device(self) -> Device:
        """Where graphs run."""
        threads = self.threads or cores.available()
        return Device(Provider(self.provider), threads, self.spin_microseconds)

    @property
    def rpc(self) -> RpcOptions:
        """How the gRPC server listens."""
        return RpcOptions(
            host=self.host,
            port=self.port,
            max_message_bytes=self.max_message_bytes,
            max_concurrent_calls=self.max_concurrent_calls,
            max_streams=self.max_streams,
            stream_window=self.stream_window,
            share_port=self.workers > 1,
            transport=TransportKind(self.transport),
        )
