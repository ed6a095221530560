"""Execution providers of ONNX Runtime that the server supports. Does not import ONNX Runtime.

A new provider is one member of `Provider` and one row of `RUNTIME_PROVIDERS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from attention_serving.server.engine.limits import MIB, Limits

# Even on one core, or on a device: while one batch is prepared or split, another computes.
MIN_PARALLEL_RUNS = 2


class ProviderError(Exception):
    """The requested execution provider is not available."""


@dataclass(frozen=True)
class RuntimeProvider:
    """What ONNX Runtime calls a provider, and how the server uses it.

    Attributes:
        name: Name in ONNX Runtime.
        package: Python package that contains it.
        memory: Name of its memory in ONNX Runtime.
        options: Provider options, by ONNX Runtime's names.
        uses_host_cores: Whether a run occupies the cores of the host. Otherwise runs take turns.
        row_multiple: What the rows of a batch are padded to a multiple of, if a kernel needs that.
        limits: Default limits, of which those of batches depend on the provider.
        arenas: The arenas of a session, as ONNX Runtime names them in the options of a run.
    """

    name: str
    package: str
    memory: str
    options: Mapping[str, str] = field(default_factory=dict)
    uses_host_cores: bool = False
    row_multiple: int = 1
    limits: Limits = Limits()  # noqa: RUF009 - it is frozen
    arenas: str = "cpu:0"


class Provider(StrEnum):
    """Where graphs run: the names in settings and on command lines."""

    CPU = "cpu"
    CUDA = "cuda"

    @property
    def runtime(self) -> RuntimeProvider:
        """The provider as ONNX Runtime knows it."""
        return RUNTIME_PROVIDERS[self]


RUNTIME_PROVIDERS = {
    Provider.CPU: RuntimeProvider("CPUExecutionProvider", "onnxruntime", "Cpu", uses_host_cores=True),
    Provider.CUDA: RuntimeProvider(
        "CUDAExecutionProvider",
        "onnxruntime-gpu",
        "Cuda",
        options={
            # TF32 keeps 10 bits of the mantissa, which is too few for the fp32 tolerance.
            "use_tf32": "0",
            # Copies are in order with the kernels of their run.
            "do_copy_in_default_stream": "1",
            # Captured graphs need fixed shapes and addresses.
            "enable_cuda_graph": "0",
        },
        # The fast kernel for masks needs multiples of 4; tensor cores are fastest with 8 in fp16.
        row_multiple=8,
        # A device needs larger batches to be busy.
        limits=Limits(max_batch_sequences=4096, max_batch_rows=16_384, max_batch_bytes=8192 * MIB),
        arenas="cpu:0;gpu:0",
    ),
}


@dataclass(frozen=True)
class Device:
    """Where and how graphs run.

    Attributes:
        provider: The execution provider.
        threads: Threads of a run that has the host's cores to itself; 0 leaves the choice to ONNX Runtime.
        spins: Whether the threads of a run on all threads stay awake between two operators.
        arena_bytes: Memory of the host that all runs together may take; 0 for no limit.
        memory_bytes: Memory of the device that all runs together may take; 0 for no limit. Ignored if the
            device is the host.
        binds: Whether inputs and outputs of runs are bound to slabs of host memory that are used again; None
            if the device is not the host, which computes in the memory of the arrays.
        overlaps: Whether bound inputs are copied to the device while another run computes. Not shown to be
            right: the runtime may hand out memory that a kernel of that run still writes.
    """

    provider: Provider = Provider.CPU
    threads: int = 0
    spins: bool = False
    arena_bytes: int = 0
    memory_bytes: int = 0
    binds: bool | None = None
    overlaps: bool = False

    @property
    def parallel_runs(self) -> int:
        """How many runs should be under way at once. On the host's cores, each has one thread."""
        return max(self.threads if self.provider.runtime.uses_host_cores else 0, MIN_PARALLEL_RUNS)

    @property
    def computing_runs(self) -> int:
        """How many of them compute at once: on a device one, beside which others are prepared or split."""
        return self.parallel_runs if self.provider.runtime.uses_host_cores else 1
