"""ONNX Runtime sessions: on the host, and on a device with inputs and outputs in page-locked memory."""

import logging
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import DTypeLike
from onnxruntime.capi import onnxruntime_pybind11_state as native

from attention_serving.server.engine.run import cuda
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
HOST = native.OrtDevice(native.OrtDevice.cpu(), native.OrtDevice.default_memory(), 0)
# Types of tensors by their names in ONNX Runtime.
DATA_TYPES: dict[str, DTypeLike] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}


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
    _bound: "BoundSession | None" = None

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
        runtime = device.provider.runtime
        on_host = runtime.uses_host_cores
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = device.threads if on_host else 1
        options.enable_mem_pattern = False
        _register_arena(device.arena_bytes)
        if not on_host:
            cuda.preload()
            if device.memory_bytes:
                _register_device_arena(device.memory_bytes)
        for name, value in _entries(device, prepack_weights=prepack_weights).items():
            options.add_session_config_entry(name, value)
        providers = [(runtime.name, device.options)]
        if not on_host:  # for operators that the device lacks
            providers.append((Provider.CPU.runtime.name, {}))
        # By default it would retry on the CPU after a failure, and print about it to standard output.
        self._session = onnxruntime.InferenceSession(path, options, providers=providers, enable_fallback=0)
        self.provider: str = self._session.get_providers()[0]
        if self.provider != runtime.name:
            raise ProviderError(f"{runtime.name} is not available: {cuda.why_not()}")
        self._arenas = runtime.arenas
        self.outputs = [output.name for output in self._session.get_outputs()]
        if not on_host:
            self._bind(path)

    def empty(self, shape: Sequence[int], data_type: DTypeLike) -> Array:
        """An array for an input, with undefined values, in memory that the device reads fast."""
        return self._bound.memory.empty(shape, data_type) if self._bound else np.empty(shape, data_type)

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
            self._bound = BoundSession(self._session, cuda.host_memory())
        except ValueError as error:
            fields = {"graph": path, "reason": str(error)}
            log.warning("outputs are not bound to page-locked memory", extra=fields)


class BoundSession:
    """A session whose device is not the host: inputs and outputs are bound to page-locked memory.

    The outputs of a run are written where they are read: into memory that the caller's arrays refer to. Both
    copies, to the device and back, are part of the run. Each run has values of its own, so that several may
    go on at once.
    """

    def __init__(self, session: onnxruntime.InferenceSession, memory: cuda.HostMemory) -> None:
        """Binds nothing yet.

        Args:
            session: The session.
            memory: Makes the arrays of the outputs.

        Raises:
            ValueError: An output cannot be bound: its type is unknown, or its shape does not follow from the
                inputs.
        """
        self._session = session
        self.memory = memory
        self._inputs: dict[str, list[Any]] = {each.name: each.shape for each in session.get_inputs()}
        self._outputs: dict[str, tuple[list[Any], DTypeLike]] = {}
        known = {axis for shape in self._inputs.values() for axis in shape if isinstance(axis, str)}
        for each in session.get_outputs():
            data_type = DATA_TYPES.get(each.type)
            if data_type is None or not all(isinstance(axis, int) or axis in known for axis in each.shape):
                raise ValueError(f"output {each.name} {each.shape}")
            self._outputs[each.name] = each.shape, data_type

    def run(
        self, inputs: dict[str, Array], options: onnxruntime.RunOptions | None = None
    ) -> dict[str, Array]:
        """Runs the graph.

        Args:
            inputs: Arrays by name.
            options: Options of the run.

        Returns:
            Output arrays by name. Their memory is used again once nothing refers to them.

        Raises:
            ValueError: An input is missing.
        """
        if missing := [name for name in self._inputs if name not in inputs]:
            raise ValueError(f"inputs {missing} are missing")
        # The runtime reads the arrays' own memory, and these variables keep it.
        arrays = {name: np.asarray(array, order="C") for name, array in inputs.items()}
        sizes = {
            axis: size
            for name, shape in self._inputs.items()
            for axis, size in zip(shape, arrays[name].shape, strict=False)
            if isinstance(axis, str)
        }
        outputs = {
            # An axis that an input lacks has no size here. The runtime refuses such an input.
            name: self.memory.empty(
                [axis if isinstance(axis, int) else sizes.get(axis, 0) for axis in shape], data_type
            )
            for name, (shape, data_type) in self._outputs.items()
        }
        self._session.run_with_ortvaluevector(
            options or onnxruntime.RunOptions(),
            list(arrays),
            _values(arrays),
            list(outputs),
            _values(outputs),
            [HOST] * len(outputs),
        )
        return outputs


def _values(arrays: dict[str, Array]) -> Any:
    """The runtime's values that share the memory of arrays."""
    values = native.OrtValueVector()
    for array in arrays.values():
        values.push_back(native.OrtValue.ortvalue_from_numpy(array, HOST))
    return values


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


def _entries(device: Device, *, prepack_weights: bool) -> dict[str, str]:
    """Options of a session, by ONNX Runtime's names.

    Threads may spin between two operators of a run, but never after it: threads that spin while another
    process needs the core make runs several times slower.
    """
    entries = {
        # All sessions share one arena. Without an arena, each long run would fault its pages in again.
        "session.use_env_allocators": "1",
        # Weights do not count towards the arena's limit.
        "session.use_device_allocator_for_initializers": "1",
        "session.intra_op.allow_spinning": str(int(device.spins)),
    }
    if device.spins:
        entries["session.intra_op.spin_duration_us"] = str(SPIN_MICROSECONDS)
        entries["session.force_spinning_stop"] = "1"
    if not prepack_weights:
        entries["session.disable_prepacking"] = "1"
    if not device.provider.runtime.uses_host_cores:
        entries["session.record_ep_graph_assignment_info"] = "1"
    return entries


def _arena_memory(name: str) -> onnxruntime.OrtMemoryInfo:
    kind = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    return onnxruntime.OrtMemoryInfo(name, kind, 0, onnxruntime.OrtMemType.DEFAULT)


@cache
def _register_arena(limit_bytes: int) -> None:
    """Registers the arena of this process's sessions. It grows by exactly what a run asks for.

    Args:
        limit_bytes: Size above which runs fail; 0 for no limit.
    """
    as_requested = {
        "max_mem": limit_bytes,
        "arena_extend_strategy": 1,
        "initial_chunk_size_bytes": -1,
        "max_dead_bytes_per_chunk": -1,
    }
    onnxruntime.create_and_register_allocator(_arena_memory("Cpu"), onnxruntime.OrtArenaCfg(as_requested))


@cache
def _register_device_arena(limit_bytes: int) -> None:
    """Registers one arena of the device for all sessions. Otherwise each has its own, and its own limit."""
    as_requested = {"max_mem": limit_bytes, "arena_extend_strategy": 1}
    try:
        onnxruntime.create_and_register_allocator_v2(
            Provider.CUDA.runtime.name, _arena_memory("Cuda"), {}, onnxruntime.OrtArenaCfg(as_requested)
        )
    except Exception as error:  # ONNX Runtime does not raise a specific type
        log.warning(
            "the limit of device memory applies to each graph by itself", extra={"reason": str(error)}
        )
