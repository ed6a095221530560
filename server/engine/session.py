"""ONNX Runtime sessions. The only file of the server that imports ONNX Runtime."""

from functools import cache
from pathlib import Path

import onnxruntime

from server.engine.provider import Device, Provider, ProviderError
from server.engine.types import Array

# ONNX Runtime writes its own log to standard error, in its own format. What it calls an error it also raises.
FATAL = 4
onnxruntime.set_default_logger_severity(FATAL)
# How long a thread that spins waits for the next operator before it sleeps.
SPIN_MICROSECONDS = 1000
# Part of the runtime's message if a run needs more memory than the arena may take.
ARENA_IS_FULL = "Available memory of"


class RunControl:
    """Ends one run early, from another thread."""

    def __init__(self) -> None:
        self.options = onnxruntime.RunOptions()

    def terminate(self) -> None:
        """Ends the run before its next operator, with an error. A later start fails at once."""
        self.options.terminate = True


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
        _set_spinning(options, spins=device.spins)
        # All sessions share one arena. Without an arena, each long run would fault its pages in again.
        _register_shared_arena(device.arena_bytes)
        options.add_session_config_entry("session.use_env_allocators", "1")
        # Weights do not count towards the arena's limit.
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
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

    def run(self, inputs: dict[str, Array], control: RunControl | None = None) -> dict[str, Array]:
        """Runs the graph.

        Args:
            inputs: Arrays by name.
            control: Can end the run early.

        Returns:
            Output arrays by name.

        Raises:
            MemoryError: The run needs more memory than the arena may take.
        """
        return self._run(inputs, control.options if control else None)

    def shrink_arena(self, inputs: dict[str, Array]) -> None:
        """Runs the graph, and then returns unused memory of the arena to the system."""
        options = onnxruntime.RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        self._run(inputs, options)

    def _run(self, inputs: dict[str, Array], options: onnxruntime.RunOptions | None) -> dict[str, Array]:
        try:
            outputs = self._session.run(self._outputs, inputs, options)
        except Exception as error:  # ONNX Runtime does not raise a specific type
            if ARENA_IS_FULL in str(error):
                raise MemoryError(str(error)) from error
            raise
        return dict(zip(self._outputs, outputs, strict=True))


def _set_spinning(options: onnxruntime.SessionOptions, *, spins: bool) -> None:
    """Lets threads spin between two operators of a run, but never after the run.

    Threads that spin while another process needs the core make runs several times slower.
    """
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spins)))
    if spins:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_MICROSECONDS))
        options.add_session_config_entry("session.force_spinning_stop", "1")


@cache
def _register_shared_arena(limit_bytes: int) -> None:
    """Registers the arena of this process's sessions. It grows by exactly what a run asks for.

    Args:
        limit_bytes: Size above which runs fail; 0 for no limit.
    """
    memory = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    as_requested = {
        "max_mem": limit_bytes,
        "arena_extend_strategy": 1,
        "initial_chunk_size_bytes": -1,
        "max_dead_bytes_per_chunk": -1,
    }
    onnxruntime.create_and_register_allocator(memory, onnxruntime.OrtArenaCfg(as_requested))


def _providers(provider: Provider) -> list[tuple[str, dict[str, str]]]:
    """The provider, and the CPU for operators that it lacks."""
    chosen = dict.fromkeys((provider, Provider.CPU))
    return [(each.runtime.name, dict(each.runtime.options)) for each in chosen]
