"""Runs a session whose device is not the host: inputs and outputs are bound to page-locked memory.

The outputs of a run are written where they are read: into memory that the caller's arrays refer to. Both
copies, to the device and back, are part of the run. The device copies page-locked memory by itself, at the
full rate of the bus, while kernels of other runs compute. To lock pages takes longer than many a run, so that
memory is kept for later runs.
"""

import ctypes
import logging
import mmap
import weakref
from collections import deque
from collections.abc import Sequence
from math import prod
from typing import Any, Protocol

import numpy as np
import onnxruntime
from numpy.typing import DTypeLike, NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as native

from attention_serving.server.engine.types import Array

log = logging.getLogger(__name__)
SMALLEST_BLOCK = 1 << 16
# Of each size, this many free blocks are kept, and more if they need little memory.
KEPT_BLOCKS, KEPT_BYTES = 4, 128 << 20
# cudaHostRegisterPortable: for all contexts of the process. Source: CUDA Runtime API, "Memory Management".
PORTABLE = 1
SUCCESS = 0
HOST = native.OrtDevice(native.OrtDevice.cpu(), native.OrtDevice.default_memory(), 0)
# Types of tensors by their names in ONNX Runtime.
DATA_TYPES: dict[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(double)": np.dtype(np.float64),
    "tensor(int64)": np.dtype(np.int64),
    "tensor(int32)": np.dtype(np.int32),
    "tensor(bool)": np.dtype(np.bool_),
}


class PageLock(Protocol):
    """Locks the pages of memory, so that a device can read and write them by itself."""

    def lock(self, address: int, size: int) -> bool:
        """Locks memory; returns whether it is locked. Memory that is not locked works too, but slower."""

    def unlock(self, address: int) -> None:
        """Unlocks what `lock` has locked."""


class CudaPageLock:
    """Locks memory through CUDA's runtime library."""

    def __init__(self, library: str) -> None:
        """Loads the library, which ONNX Runtime uses too. If it does not load, nothing is locked.

        Args:
            library: Its file name, such as libcudart.so.13.
        """
        self._library: ctypes.CDLL | None = None
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            log.warning("host memory is not page-locked", extra={"library": library, "reason": str(error)})

    def lock(self, address: int, size: int) -> bool:
        """Locks memory; returns whether it is locked."""
        if self._library is None:
            return False
        where, length = ctypes.c_void_p(address), ctypes.c_size_t(size)
        if self._library.cudaHostRegister(where, length, PORTABLE) == SUCCESS:
            return True
        # The library keeps the error until it is asked, and ONNX Runtime would take it for one of its own.
        self._library.cudaGetLastError()
        return False

    def unlock(self, address: int) -> None:
        """Unlocks what `lock` has locked."""
        if self._library is not None:
            self._library.cudaHostUnregister(ctypes.c_void_p(address))


class Block:
    """Memory of a fixed size, whole pages."""

    def __init__(self, size: int, page_lock: PageLock) -> None:
        self.size = size
        self._memory = mmap.mmap(-1, size)
        self._page_lock = page_lock
        self._address = self.array().ctypes.data
        self.is_locked = page_lock.lock(self._address, size)

    def array(self) -> NDArray[np.uint8]:
        """The bytes. Views of this array refer to it and not to the block."""
        return np.frombuffer(self._memory, np.uint8)

    def unlock(self) -> None:
        """Unlocks the pages. The memory is returned to the system when no array refers to it."""
        if self.is_locked:
            self._page_lock.unlock(self._address)
            self.is_locked = False


class HostMemory:
    """Makes arrays. May be used by several threads at once.

    The memory of an array is used again when neither the array nor a view of it is left.
    """

    def __init__(self, page_lock: PageLock) -> None:
        self._page_lock = page_lock
        # A deque for each size of block: appending and popping are atomic. A lock could be taken twice by one
        # thread, because the collector may end arrays at any time.
        self._free: dict[int, deque[Block]] = {}

    def empty(self, shape: Sequence[int], data_type: DTypeLike) -> Array:
        """An array of that shape and type, whose values are undefined."""
        dtype = np.dtype(data_type)
        count = prod(shape) * dtype.itemsize
        block = self._take(block_size(count))
        whole = block.array()
        weakref.finalize(whole, self._give_back, block).atexit = False
        return whole[:count].view(dtype).reshape(shape)

    @property
    def free_bytes(self) -> int:
        """Memory that is kept for later arrays."""
        return sum(size * len(blocks) for size, blocks in list(self._free.items()))

    def _take(self, size: int) -> Block:
        try:
            return self._free[size].pop()
        except (KeyError, IndexError):
            return Block(size, self._page_lock)

    def _give_back(self, block: Block) -> None:
        free = self._free.setdefault(block.size, deque())
        if len(free) < KEPT_BLOCKS or block.size * (len(free) + 1) <= KEPT_BYTES:
            free.append(block)
        else:
            block.unlock()


def block_size(count: int) -> int:
    """The size of the block for so many bytes: four sizes for each power of two, so that few are unused."""
    if count <= SMALLEST_BLOCK:
        return SMALLEST_BLOCK
    step = 1 << ((count - 1).bit_length() - 3)
    return -(-count // step) * step


class UnboundOutputError(Exception):
    """An output cannot be bound: its type is unknown, or its shape does not follow from the inputs."""


class BoundSession:
    """A session with bound inputs and outputs. Each run has values of its own, so that several may go on."""

    def __init__(self, session: onnxruntime.InferenceSession, memory: HostMemory) -> None:
        """Binds nothing yet.

        Args:
            session: The session.
            memory: Makes the arrays of the outputs.

        Raises:
            UnboundOutputError: An output cannot be bound.
        """
        self._session = session
        self._memory = memory
        self._inputs: dict[str, list[Any]] = {each.name: each.shape for each in session.get_inputs()}
        self._outputs: dict[str, tuple[list[Any], np.dtype[Any]]] = {}
        known = {axis for shape in self._inputs.values() for axis in shape if isinstance(axis, str)}
        for each in session.get_outputs():
            data_type: Any = DATA_TYPES.get(each.type)
            if data_type is None or not all(isinstance(axis, int) or axis in known for axis in each.shape):
                raise UnboundOutputError(f"output {each.name} {each.shape}")
            self._outputs[each.name] = each.shape, data_type

    def empty(self, shape: Sequence[int], data_type: DTypeLike) -> Array:
        """An array for an input, whose values are undefined. Other arrays are copied more slowly."""
        return self._memory.empty(shape, data_type)

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
        sizes = self._sizes(arrays)
        outputs = {
            # An axis that an input lacks has no size here. The runtime refuses such an input.
            name: self._memory.empty(
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

    def _sizes(self, arrays: dict[str, Array]) -> dict[str, int]:
        """The sizes of the symbolic axes."""
        return {
            axis: size
            for name, shape in self._inputs.items()
            for axis, size in zip(shape, arrays[name].shape, strict=False)
            if isinstance(axis, str)
        }


def _values(arrays: dict[str, Array]) -> Any:
    """The runtime's values that share the memory of arrays."""
    values = native.OrtValueVector()
    for array in arrays.values():
        values.push_back(native.OrtValue.ortvalue_from_numpy(array, HOST))
    return values
