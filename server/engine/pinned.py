"""Host memory for the inputs and outputs of runs on a device: page-locked, and used again.

The device copies page-locked memory by itself, at the full rate of the bus, while kernels run. To lock pages
takes longer than many a run, so that memory is kept for later runs.
"""

import ctypes
import logging
import mmap
import weakref
from collections import deque
from collections.abc import Sequence
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from attention_serving.server.engine.types import Array

log = logging.getLogger(__name__)
SMALLEST_BLOCK = 1 << 16
# Of each size, this many free blocks are kept, and more if they need little memory.
KEPT_BLOCKS, KEPT_BYTES = 4, 128 << 20
# cudaHostRegisterPortable: for all contexts of the process. Source: CUDA Runtime API, "Memory Management".
PORTABLE = 1
SUCCESS = 0


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
