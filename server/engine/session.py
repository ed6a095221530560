"""ONNX Runtime: opens graphs and runs them. The only file that imports it."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

import onnxruntime

from server.engine.types import Array


class Provider(StrEnum):
    """Where graphs run."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True)
class Device:
    """Where and how graphs run.

    Attributes:
        provider: The execution provider.
        threads: Threads of one operator; 0 leaves it to the runtime.
        spin_microseconds: How long such a thread looks for work before it sleeps.
    """

    provider: Provider = Provider.CPU
    threads: int = 0
    spin_microseconds: int = 0


class ProviderError(Exception):
    """The execution provider that was asked for is not there."""


class Session:
    """One graph, loaded. Several threads may run it at a time."""

    def __init__(self, path: Path, device: Device, *, pack_weights: bool = True) -> None:
        """Loads the graph.

        Args:
            path: The ONNX file.
            device: Where it runs.
            pack_weights: Whether to copy weights into the order that the kernels read fastest. Otherwise
                they stay in the file's pages, which graphs and processes share.

        Raises:
            ProviderError: The runtime has not got the provider. It would fall back to CPU in silence.
        """
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = device.threads
        # A run's threads look for work between two operators, then sleep; after the run they sleep at once.
        # Where something else keeps a core busy, spinning for long makes runs several times slower.
        spins = device.spin_microseconds > 0
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spins)))
        if spins:
            duration = str(device.spin_microseconds)
            options.add_session_config_entry("session.intra_op.spin_duration_us", duration)
            options.add_session_config_entry("session.force_spinning_stop", "1")
        # One arena for all sessions. Without one, each long run would fault its pages in again.
        _share_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.enable_mem_pattern = False
        if not pack_weights:
            options.add_session_config_entry("session.disable_prepacking", "1")
        self._session = onnxruntime.InferenceSession(path, options, providers=_providers(device.provider))
        self.provider: str = self._session.get_providers()[0]
        if device.provider is Provider.CUDA and self.provider != "CUDAExecutionProvider":
            raise ProviderError("CUDAExecutionProvider is not available; is onnxruntime-gpu installed?")
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: dict[str, Array], *, give_back: bool = False) -> dict[str, Array]:
        """Runs the graph: arrays by name in, arrays by name out.

        Args:
            inputs: By name.
            give_back: Whether to return to the system what the arena holds and no run needs.
        """
        options = onnxruntime.RunOptions() if give_back else None
        if options:
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        return dict(zip(self._outputs, self._session.run(self._outputs, inputs, options), strict=True))


@cache
def _share_arena() -> None:
    """Makes the arena that the sessions of this process share; it grows by what is asked for, no more."""
    memory = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    as_requested = {
        "max_mem": 0,
        "arena_extend_strategy": 1,
        "initial_chunk_size_bytes": -1,
        "max_dead_bytes_per_chunk": -1,
    }
    onnxruntime.create_and_register_allocator(memory, onnxruntime.OrtArenaCfg(as_requested))


def _providers(provider: Provider) -> list[str | tuple[str, dict[str, str]]]:
    if provider is Provider.CUDA:
        # TF32 keeps 10 bits of the mantissa: too few for the fp32 tolerance.
        return [("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"]
    return ["CPUExecutionProvider"]
