"""ONNX Runtime sessions, on the host and on a device."""

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnxruntime
from onnxruntime import OrtValue

from attention_serving.artifact.runtime import unsafe_optimizers
from attention_serving.server.engine.run import cuda, driver
from attention_serving.server.engine.run.memory import Allocator, SlabPool
from attention_serving.server.engine.run.provider import Device, Provider, ProviderError
from attention_serving.server.engine.types import Array, Context

# An input of a run, which may be on the device.
Value: TypeAlias = Array | OrtValue
log = logging.getLogger(__name__)

# ONNX Runtime writes its own log to standard error, in its own format. What it calls an error it also raises.
FATAL = 4
onnxruntime.set_default_logger_severity(FATAL)
# How long a thread that spins waits for the next operator before it sleeps. As fast as a millisecond if
# cores are idle. If others share them, a run of 128 x 768 takes 0.7 times as long.
SPIN_MICROSECONDS = 20
# Parts of the runtime's messages if a run needs more memory than the arena may take, or the device has.
OUT_OF_MEMORY = (
    "Available memory of",
    "Failed to allocate memory for requested buffer",
    "CUDA failure 2:",
    "CUDA error cudaErrorMemoryAllocation",
    "CUBLAS failure 3:",
)
# Element types of outputs by the runtime's names.
ELEMENT_TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}
# The size of an axis of an output that is not an axis of an input.
UNKNOWN = -1
# Runs on a device take turns: two at a time returned wrong values on an H100, for a reason that is not known.
# github.com/microsoft/onnxruntime/issues/32342 is similar; its cause, memory of Einsum, is in no graph here.
# A thread that holds the turn runs without a wait.
DEVICE_TURN = threading.RLock()
# Operators that compute with sizes of tensors, for which the runtime prefers the host. They take a few
# numbers, and are not a reason for a warning.
SHAPE_OPERATORS = (
    "Shape", "Size", "Gather", "Slice", "Concat", "Squeeze", "Unsqueeze", "Add", "Sub", "Mul", "Div", "Mod",
    "Min", "Max", "Range", "Reshape", "Cast", "Identity", "Constant",
)  # fmt: skip


class RunControl:
    """The options of one run, and its early end from another thread."""

    def __init__(self) -> None:
        self.options = onnxruntime.RunOptions()

    def terminate(self) -> None:
        """Ends the run before its next operator, with an error. A later start fails at once."""
        self.options.terminate = True


class Session:
    """One loaded graph. May be run by several threads at once; on a device, their runs take turns.

    Attributes:
        provider: ONNX Runtime's name of the execution provider.
        inputs: Names of the inputs.
        outputs: Names of the outputs.
        types: The runtime's types of the outputs by name, such as tensor(float).
        host_nodes: Kind and name of the operators of tensors that run on the host although the provider is a
            device, which lacks them: their tensors are copied to the host and back in every run.
        slabs: Memory of the inputs and outputs of bound runs; None if runs are not bound.
        empty: Makes an array for an input, as `numpy.empty` does; of bound runs in a slab.
    """

    def __init__(self, path: Path, device: Device, *, prepack_weights: bool = True) -> None:
        """Loads the graph.

        Args:
            path: The ONNX file.
            device: Where the graph runs.
            prepack_weights: Whether to copy weights into the layout that the kernels read fastest. Otherwise
                they stay in the file's memory-mapped pages, which sessions and processes share.

        Raises:
            ProviderError: The device cannot be used. ONNX Runtime itself would silently run on the CPU.
        """
        runtime = device.provider.runtime
        on_host = runtime.uses_host_cores
        self._device_lock: AbstractContextManager[object] = nullcontext() if on_host else DEVICE_TURN
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = device.threads if on_host else 1
        options.enable_mem_pattern = False
        _register_arena(Provider.CPU, device.arena_bytes)
        if not on_host:
            cuda.find_device()
            _register_arena(device.provider, device.memory_bytes)
        for name, value in _entries(device, prepack_weights=prepack_weights).items():
            options.add_session_config_entry(name, value)
        providers = [(runtime.name, dict(runtime.options))]
        if not on_host:  # for operators that the device lacks
            providers.append((Provider.CPU.runtime.name, {}))
        # By default it would retry on the CPU after a failure, and print about it to standard output.
        with self._device_lock:
            self._session = onnxruntime.InferenceSession(
                path,
                options,
                providers=providers,
                enable_fallback=0,
                disabled_optimizers=unsafe_optimizers(path),
            )
        self.provider: str = self._session.get_providers()[0]
        if self.provider != runtime.name:
            raise ProviderError(f"{runtime.name} did not take the graph, although it computes on the device")
        self._arenas, self._memory, self._overlaps = runtime.arenas, runtime.memory.lower(), device.overlaps
        self._synchronize: Callable[[], None] = _do_nothing if on_host else driver.synchronize
        binds = not on_host if device.binds is None else device.binds
        self.slabs = slab_pool(device.provider) if binds else None
        self.empty: Allocator = np.empty if self.slabs is None else self.slabs.empty
        self._axes = {
            value.name: value.shape for value in (*self._session.get_inputs(), *self._session.get_outputs())
        }
        self.inputs = {tensor.name for tensor in self._session.get_inputs()}
        self.outputs = [output.name for output in self._session.get_outputs()]
        self.types = {output.name: output.type for output in self._session.get_outputs()}
        self.host_nodes = [] if on_host else host_operators(self._session, self.provider)
        if self.host_nodes:
            fields = {"graph": path, "provider": self.provider, "operators": ", ".join(self.host_nodes)}
            log.warning("operators run on the host", extra=fields)

    def run(self, inputs: dict[str, Value], control: RunControl | None = None) -> dict[str, Array]:
        """Runs the graph.

        Args:
            inputs: Arrays by name; of bound runs also tensors on the device.
            control: Can end the run early.

        Returns:
            Output arrays by name. Those of bound runs are in slabs, which they keep from other runs.

        Raises:
            MemoryError: The run needs more memory than the arena may take.
        """
        options = control.options if control else None
        try:
            if self.slabs is not None:
                return self._run_bound(self.slabs, inputs, options)
            with self._device_lock:
                outputs = self._session.run(self.outputs, inputs, options)
        except Exception as error:  # ONNX Runtime does not raise a specific type
            if any(text in str(error) for text in OUT_OF_MEMORY):
                raise MemoryError(str(error)) from error
            raise
        return dict(zip(self.outputs, outputs, strict=True))

    def _run_bound(
        self, slabs: SlabPool, inputs: dict[str, Value], options: onnxruntime.RunOptions | None
    ) -> dict[str, Array]:
        """Runs with inputs and outputs that the runtime copies from and to the memory of arrays.

        An output gets memory of the runtime if its sizes are not those of axes of inputs.
        """
        sizes: dict[str | int | None, int] = {}
        for name, value in inputs.items():
            shape = value.shape() if isinstance(value, OrtValue) else value.shape
            sizes.update(zip(self._axes[name], shape, strict=False))  # the runtime checks the rank
        binding, bound = self._session.io_binding(), dict[str, Array]()
        for name in self.outputs:
            axes, data_type = self._axes[name], ELEMENT_TYPES.get(self.types[name])
            shape = [axis if isinstance(axis, int) else sizes.get(axis, UNKNOWN) for axis in axes]
            if UNKNOWN in shape or data_type is None:
                binding.bind_output(name)
            else:
                bound[name] = slabs.empty(shape, data_type)
                binding.bind_ortvalue_output(name, OrtValue.ortvalue_from_numpy(bound[name]))
        if self._overlaps:
            self._bind_inputs(binding, inputs)
        with self._device_lock:
            try:
                if not self._overlaps:
                    self._bind_inputs(binding, inputs)
                self._session.run_with_iobinding(binding, options)
            finally:  # also of a run that has failed, whose kernels may still read and write
                self._synchronize()
                binding.clear_binding_inputs()
        outputs = zip(self.outputs, binding.get_outputs(), strict=True)
        return {name: bound[name] if name in bound else value.numpy() for name, value in outputs}

    def _bind_inputs(self, binding: onnxruntime.IOBinding, inputs: dict[str, Value]) -> None:
        """Copies inputs to the device, unless they are there. Copies have ended when it returns or raises."""
        try:
            for name, value in inputs.items():
                if isinstance(value, OrtValue):
                    binding.bind_ortvalue_input(name, value)
                else:
                    binding.bind_cpu_input(name, value)
        finally:
            self._synchronize()

    def context_inputs(self, context: Context) -> Mapping[str, Value]:
        """The tensors of a stored context as inputs of runs; on the device if runs are bound.

        They are copied there when the context is first used, and freed with it. If the device has no memory
        for them, every run copies them.
        """
        if self.slabs is None:
            return context.tensors
        if not context.device_tensors:
            try:
                with self._device_lock:
                    context.device_tensors = {
                        name: OrtValue.ortvalue_from_numpy(array, self._memory)
                        for name, array in context.tensors.items()
                    }
            except Exception as error:  # ONNX Runtime does not raise a specific type
                log.warning("context not kept on the device", extra={"reason": str(error)})
                context.device_tensors = context.tensors
        return context.device_tensors

    def shrink_arena(self, inputs: dict[str, Array]) -> None:
        """Runs the graph, and then returns unused memory of the arenas to the system and to the device."""
        control = RunControl()
        control.options.add_run_config_entry("memory.enable_memory_arena_shrinkage", self._arenas)
        try:
            self.run(inputs, control)
        except Exception as error:  # the memory is kept then; results are not at stake
            log.warning("arena not trimmed", extra={"provider": self.provider, "reason": str(error)})


def _do_nothing() -> None:
    """Takes the place of `driver.synchronize` on the host, which has finished when a call returns."""


@cache
def slab_pool(provider: Provider) -> SlabPool:
    """The slabs of all sessions of this process."""
    return SlabPool() if provider.runtime.uses_host_cores else SlabPool(registry=driver)


def host_operators(session: onnxruntime.InferenceSession, provider: str) -> list[str]:
    """Kind and name of the operators of tensors that do not run on a provider (ONNX Runtime's name)."""
    return [
        f"{node.op_type} {node.name}".rstrip()
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name != provider
        for node in part.get_nodes()
        if node.op_type not in SHAPE_OPERATORS
    ]


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


@cache
def _register_arena(provider: Provider, limit_bytes: int) -> None:
    """Registers one arena for all sessions of this process. It grows by exactly what a run asks for.

    On a device, each session would otherwise keep what its largest run took.

    Args:
        provider: Whose memory it manages.
        limit_bytes: Size above which runs fail; 0 for no limit.
    """
    kind, memory = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, onnxruntime.OrtMemType.DEFAULT
    information = onnxruntime.OrtMemoryInfo(provider.runtime.memory, kind, 0, memory)
    as_requested = onnxruntime.OrtArenaCfg({"max_mem": limit_bytes, "arena_extend_strategy": 1})
    onnxruntime.create_and_register_allocator_v2(provider.runtime.name, information, {}, as_requested)
