"""ONNX Runtime sessions."""

import logging
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import DTypeLike

from attention_serving.server.engine.run import cuda
from attention_serving.server.engine.run.binding import (
    BoundSession,
    CudaPageLock,
    HostMemory,
    UnboundOutputError,
)
from attention_serving.server.engine.run.provider import Device, Provider, ProviderError
from attention_serving.server.engine.types import Array

log = logging.getLogger(__name__)

# ONNX Runtime writes its own log to standard error, in its own format. What it calls an error it also raises.
FATAL = 4
onnxruntime.set_default_logger_severity(FATAL)
# How long a thread that spins waits for the next operator before it sleeps. As fast as a millisecond if
# cores are idle. If others share them, a run of 128 x 768 takes 0.7 times as long.
SPIN_MICROSECONDS = 20
# Parts of the runtime's messages if a run needs more memory than the arena may take, or the device has.
OUT_OF_MEMORY = ("Available memory of", "CUDA failure 2:", "CUDA error cudaErrorMemoryAllocation")
# Operators that compute with sizes of tensors, for which the runtime prefers the host. They take a few
# numbers, and are not a reason for a warning.
SHAPE_OPERATORS = (
    "Shape", "Size", "Gather", "Slice", "Concat", "Squeeze", "Unsqueeze", "Add", "Sub", "Mul", "Div", "Min",
    "Max", "Range", "Cast", "Identity", "Constant",
)  # fmt: skip


class HostNodes(NamedTuple):
    """The operators of a session that run on the host, although its provider is a device.

    The device lacks them, and their tensors are copied to the host and back in every run.

    Attributes:
        shapes: Kind and name of those that compute with sizes only, as far as their kinds tell.
        tensors: Kind and name of all others. There should be none.
    """

    shapes: list[str]
    tensors: list[str]


class RunControl:
    """The options of one run, and its early end from another thread."""

    def __init__(self) -> None:
        self.options = onnxruntime.RunOptions()

    def terminate(self) -> None:
        """Ends the run before its next operator, with an error. A later start fails at once."""
        self.options.terminate = True


class Session:
    """One loaded graph. May be run by several threads at once.

    Attributes:
        provider: ONNX Runtime's name of the execution provider.
        outputs: Names of the outputs.
        host_nodes: The operators that run on the host although the provider is a device.
    """

    host_nodes: HostNodes = HostNodes([], [])
    _bound: BoundSession | None = None

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
        on_host = device.provider.runtime.uses_host_cores
        options.intra_op_num_threads = device.threads if on_host else 1
        _set_spinning(options, spins=device.spins)
        # All sessions share one arena. Without an arena, each long run would fault its pages in again.
        _register_shared_arena(device.arena_bytes)
        options.add_session_config_entry("session.use_env_allocators", "1")
        # Weights do not count towards the arena's limit.
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        options.enable_mem_pattern = False
        if not prepack_weights:
            options.add_session_config_entry("session.disable_prepacking", "1")
        if not on_host:
            cuda.preload()
            if device.memory_bytes:
                _register_device_arena(device.memory_bytes)
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        # By default it would retry on the CPU after a failure, and print about it to standard output.
        self._session = onnxruntime.InferenceSession(
            path, options, providers=_providers(device), enable_fallback=0
        )
        self.provider: str = self._session.get_providers()[0]
        if self.provider != (wanted := device.provider.runtime).name:
            raise ProviderError(f"{wanted.name} is not available: {cuda.why_not()}")
        self._arenas = wanted.arenas
        self.outputs = [output.name for output in self._session.get_outputs()]
        if not on_host:
            self._bind(path)

    def empty(self, shape: Sequence[int], data_type: DTypeLike) -> Array:
        """An array for an input, with undefined values, in memory that the device reads fast."""
        return self._bound.empty(shape, data_type) if self._bound else np.empty(shape, data_type)

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
        options = control.options if control else None
        try:
            if self._bound:
                return self._bound.run(inputs, options)
            outputs = self._session.run(self.outputs, inputs, options)
        except Exception as error:  # ONNX Runtime does not raise a specific type
            if any(text in str(error) for text in OUT_OF_MEMORY):
                raise MemoryError(str(error)) from error
            raise
        return dict(zip(self.outputs, outputs, strict=True))

    def shrink_arena(self, inputs: dict[str, Array]) -> None:
        """Runs the graph, and then returns unused memory of the arenas to the system and to the device."""
        control = RunControl()
        control.options.add_run_config_entry("memory.enable_memory_arena_shrinkage", self._arenas)
        try:
            self.run(inputs, control)
        except Exception as error:
            if self._bound is None:
                raise
            log.warning("arena not trimmed", extra={"provider": self.provider, "reason": str(error)})

    def _bind(self, path: Path) -> None:
        """Binds inputs and outputs to page-locked memory, and names what does not run on the device."""
        assigned = self._session.get_provider_graph_assignment_info()
        self.host_nodes = left_on_host(assigned, self.provider)
        if self.host_nodes.tensors:
            operators = ", ".join(self.host_nodes.tensors)
            fields = {"graph": path, "provider": self.provider, "operators": operators}
            log.warning("operators run on the host", extra=fields)
        try:
            self._bound = BoundSession(self._session, _host_memory())
        except UnboundOutputError as error:
            fields = {"graph": path, "reason": str(error)}
            log.warning("outputs are not bound to page-locked memory", extra=fields)


def left_on_host(assigned: Iterable[Any], provider: str) -> HostNodes:
    """The operators of a session that do not run on its provider.

    Args:
        assigned: The operators by provider, as `get_provider_graph_assignment_info` returns them.
        provider: ONNX Runtime's name of the provider that should run everything.
    """
    found = HostNodes([], [])
    for part in assigned:
        for node in part.get_nodes() if part.ep_name != provider else ():
            own = found.shapes if node.op_type in SHAPE_OPERATORS else found.tensors
            own.append(f"{node.op_type} {node.name}".rstrip())
    return found


@cache
def _register_device_arena(limit_bytes: int) -> None:
    """Registers one arena of the device for all sessions. Otherwise each has its own, and its own limit."""
    memory = onnxruntime.OrtMemoryInfo(
        "Cuda", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    as_requested = {"max_mem": limit_bytes, "arena_extend_strategy": 1}
    try:
        onnxruntime.create_and_register_allocator_v2(
            Provider.CUDA.runtime.name, memory, {}, onnxruntime.OrtArenaCfg(as_requested)
        )
    except Exception as error:  # ONNX Runtime does not raise a specific type
        log.warning(
            "the limit of device memory applies to each graph by itself", extra={"reason": str(error)}
        )


@cache
def _host_memory() -> HostMemory:
    """Memory of this process for the inputs and outputs of all sessions."""
    return HostMemory(CudaPageLock(f"libcudart.so.{cuda.cuda_version().split('.')[0]}"))


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


def _providers(device: Device) -> list[tuple[str, dict[str, str]]]:
    """The provider, and the CPU for operators that it lacks."""
    chosen = (device.provider.runtime.name, device.options)
    return [chosen] if device.provider.runtime.uses_host_cores else [chosen, (Provider.CPU.runtime.name, {})]
