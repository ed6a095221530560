"""ONNX Runtime sessions. The only file of the server that imports ONNX Runtime."""

from functools import cache
from pathlib import Path

import onnxruntime

from server.engine.provider import Device, Provider, ProviderError
from server.engine.types import Array

# ONNX Runtime writes its own log to standard error, in its own format. What it calls an error it also raises.
FATAL = 4
onnxruntime.set_default_logger_severity(FATAL)


class Session:
    """One loaded graph. May be run by several threads at once."""

    def __init__(self, path: Path, device: Device, *, prepack_weights: bool = True) -> None:
        """Loads the graph.

        Args:
            path: The ONNX file.
            device: Where the graph runs.
            prepack_weights: Whether to copy weights into the layout that the kernels read fastest. Otherwise
                they stay in the file's memory-mapped pages, which sessions and processes share.

        Raises:
            ProviderError: The execution provider is not available. ONNX Runtime itself would silently fall
                back to the CPU.
        """
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = device.threads
        _set_spinning(options, device.spin_microseconds)
        # All sessions share one arena. Without an arena, each long run would fault its pages in again.
        _register_shared_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.enable_mem_pattern = False
        if not prepack_weights:
            options.add_session_config_entry("session.disable_prepacking", "1")
        # By default it would retry on the CPU after a failure, and print about it to standard output.
        self._session = onnxruntime.InferenceSession(
            path, options, providers=_providers(device.provider), enable_fallback=0
        )
        self.provider: str = self._session.get_providers()[0]
        if self.provider != (wanted := device.provider.runtime).name:
            raise ProviderError(f"{wanted.name} is not available; check that {wanted.package} is installed")
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: dict[str, Array], *, shrink_arena: bool = False) -> dict[str, Array]:
        """Runs the graph.

        Args:
            inputs: Arrays by name.
            shrink_arena: Whether to return unused memory of the arena to the system after the run.

        Returns:
            Output arrays by name.
        """
        options = onnxruntime.RunOptions() if shrink_arena else None
        if options:
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        return dict(zip(self._outputs, self._session.run(self._outputs, inputs, options), strict=True))


def _set_spinning(options: onnxruntime.SessionOptions, microseconds: int) -> None:
    """Lets threads spin between two operators of a run, but never after the run.

    Threads that spin while another process needs the core make runs several times slower.
    """
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(microseconds > 0)))
    if microseconds > 0:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(microseconds))
        options.add_session_config_entry("session.force_spinning_stop", "1")


@cache
def _register_shared_arena() -> None:
    """Registers the arena of this process's sessions. It grows by exactly what a run asks for."""
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


def _providers(provider: Provider) -> list[tuple[str, dict[str, str]]]:
    """The provider, and the CPU for operators that it lacks."""
    chosen = dict.fromkeys((provider, Provider.CPU))
    return [(each.runtime.name, dict(each.runtime.options)) for each in chosen]
