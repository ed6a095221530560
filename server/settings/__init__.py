"""The server's options: their names, types, ranges and defaults; and what is derived from them."""

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from attention_serving.server import machine
from attention_serving.server.engine.limits import MIB, Limits
from attention_serving.server.engine.run.provider import Device, Provider
from attention_serving.server.settings.sections import (
    IdentityAndRights,
    Models,
    Network,
    Observability,
    Process,
    Requests,
    Security,
)

# Part of a message that is not tensor data: names, and the lengths of thousands of sequences.
HEADER_BYTES = MIB // 16
# How much more memory runs may take than is expected, before they fail.
ARENA_FACTOR = 1.25
# How long the thread that receives calls stays awake after a run if latency matters most.
AWAKE_SECONDS = 0.001


class Settings(Models, Network, Security, IdentityAndRights, Requests, Process, Observability):
    """Every option of the server. `server.command_line` reads them from flags, environment and file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("unix_socket", "allow_shared_memory")
    @classmethod
    def _belongs_to_one_process(cls, value: object, info: ValidationInfo) -> object:
        if value and info.data.get("workers", 1) > 1:
            raise ValueError("needs a single worker; set workers to 1")
        return value

    @field_validator("model_control")
    @classmethod
    def _reaches_one_process(cls, value: object, info: ValidationInfo) -> object:
        if value == "explicit" and info.data.get("workers", 1) > 1:
            raise ValueError(
                "needs a single worker, because a load request reaches only one of several;"
                " set workers to 1, or model_control to poll, which every worker follows"
            )
        return value

    @field_validator("http_explore")
    @classmethod
    def _needs_http(cls, value: object, info: ValidationInfo) -> object:
        if value and info.data.get("http_port") is None:
            raise ValueError("needs HTTP; set http_port")
        return value

    @property
    def _memory(self) -> int:
        share = machine.available_bytes() // (2 * self.workers)
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
    def _memory_for_started_runs(self) -> int:
        on_device = self.provider != "cpu" and self.device_memory
        return int(self.device_memory) if on_device else self.memory_for_runs

    @property
    def device(self) -> Device:
        """Where graphs run.

        Raises:
            ValueError: The provider is auto: `server.providers.resolve` has not chosen one yet.
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
    def max_golden_bytes(self) -> int:
        """Expected memory of the largest golden case that is replayed in service; 0 if none is.

        The replay takes it beside the runs of requests: from what the arena has beyond their share.
        """
        return int((ARENA_FACTOR - 1) * self.memory_for_runs) if self.canary_seconds else 0

    @property
    def awake_seconds(self) -> float:
        """How long the thread that receives calls stays awake after a run; 0 if another core is lacking."""
        return AWAKE_SECONDS if self.latency == "lowest" and self.device.threads > 1 else 0.0

    @property
    def limits(self) -> Limits:
        """What the engine may hold."""
        return Limits(
            max_sequence_length=self.max_sequence_length,
            max_input_bytes=self.max_message_bytes,
            max_result_bytes=self.max_message_bytes - HEADER_BYTES,
            max_run_bytes=self._memory_for_started_runs,
            max_in_flight_bytes=self.memory_for_requests,
            max_batch_sequences=self.max_batch_sequences,
            max_batch_bytes=self.max_batch_bytes,
        )


# The sections of the help, in its order.
SECTIONS: dict[str, type[BaseModel]] = {
    "Models": Models,
    "Network": Network,
    "Security": Security,
    "Identity and rights": IdentityAndRights,
    "Requests": Requests,
    "Process": Process,
    "Observability": Observability,
}
