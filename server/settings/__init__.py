"""The server's options: their names, types, ranges and defaults; and what is derived from them."""

from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

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
# Estimated memory of the run of several sequences, on the CPU and on CUDA, where larger runs gain.
MAX_BATCH_BYTES = {"cpu": 256 * MIB, "cuda": 8192 * MIB}
# What options need beside others.
ONE_WORKER = "needs a single worker; set workers to 1"
NOT_EXPLICIT = "needs a single worker, because a load request reaches only one; set workers to 1, or use poll"
PAIR = "is needed with tls_certificate, and tls_certificate with it"
NO_PAIR = "needs tls_certificate and tls_key too"
NO_ISSUER = "needs jwt_issuer and jwt_audience"
# A process that serves reports so every second.
MIN_TIMEOUT, SHORT = 2.0, "must be 0, or at least 2"
# How long the thread that receives calls stays awake after a run if latency matters most.
AWAKE_SECONDS = 0.001


class Settings(Models, Network, Security, IdentityAndRights, Requests, Process, Observability):
    """Every option of the server. `server.command_line` reads them from flags, environment and file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="after")
    def _are_consistent(self) -> Self:
        several = self.workers > 1
        rules = (
            ("unix_socket", self.unix_socket and several, ONE_WORKER),
            ("allow_shared_memory", self.allow_shared_memory and several, ONE_WORKER),
            ("model_control", self.model_control == "explicit" and several, NOT_EXPLICIT),
            ("http_explore", self.http_explore and self.http_port is None, "needs HTTP; set http_port"),
            ("tls_key", (self.tls_key is None) != (self.tls_certificate is None), PAIR),
            ("tls_client_ca", self.tls_client_ca and not self.tls_certificate, NO_PAIR),
            ("worker_timeout_seconds", 0 < self.worker_timeout_seconds < MIN_TIMEOUT, SHORT),
            ("jwt_jwks", self.jwt_jwks and not (self.jwt_issuer and self.jwt_audience), NO_ISSUER),
            (
                "max_in_flight_bytes",
                0 < self.max_memory <= self.max_in_flight_bytes,
                "must be below max_memory",
            ),
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
    def device(self) -> Device:
        """Where graphs run.

        Raises:
            ValueError: The provider is auto: `server.application.resolve` has not chosen one yet.
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
    def awake_seconds(self) -> float:
        """How long the thread that receives calls stays awake after a run; 0 if another core is lacking."""
        return AWAKE_SECONDS if self.latency == "lowest" and self.device.threads > 1 else 0.0

    @property
    def limits(self) -> Limits:
        """What the engine may hold."""
        on_device = self.provider != "cpu" and self.device_memory > 0
        return Limits(
            max_sequence_length=self.max_sequence_length,
            max_input_bytes=self.max_message_bytes,
            max_result_bytes=self.max_message_bytes - HEADER_BYTES,
            max_run_bytes=int(self.device_memory) if on_device else self.memory_for_runs,
            max_in_flight_bytes=self.memory_for_requests,
            max_batch_sequences=self.max_batch_sequences,
            max_batch_bytes=MAX_BATCH_BYTES.get(self.provider, 256 * MIB),
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
