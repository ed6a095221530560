"""Host memory of bound runs: slabs that are registered with the device once, and used again.

A device copies registered memory at the speed of the bus, and other memory through a buffer of its driver.
Registration locks the pages of a slab, which takes longer than to copy them.

An array keeps its slab until the array and all its views are gone. The outputs of a run are therefore not
overwritten while anything refers to them, such as a result that waits for its reply.
"""

import ctypes
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from mmap import mmap
from typing import Any, Protocol, TypeAlias
from weakref import finalize

import numpy as np
from numpy.typing import DTypeLike

from attention_serving.server.engine.run.provider import ProviderError
from attention_serving.server.engine.types import Array

# Makes an array of a shape and a type.
Allocator: TypeAlias = Callable[[Sequence[int], DTypeLike], Array]
log = logging.getLogger(__name__)
# Memory of all slabs of a process.
MAX_SLAB_BYTES = 2 << 30
# Smaller arrays have memory of their own, which a driver copies as fast.
LEAST_ARRAY_BYTES = 64 << 10
# A slab that was not used for so long gives way to one of another size.
STALE_SECONDS = 10.0
ADDRESS_BITS = 64


class Registry(Protocol):
    """Registers host memory with a device; the module `server.engine.run.driver` is one."""

    def register(self, address: int, size: int) -> None:
        """Locks the pages of some memory; raises ProviderError if that fails."""

    def unregister(self, address: int) -> None:
        """Unlocks them again, before the memory is freed; raises ProviderError if that fails."""


class Slab:
    """Page-aligned memory.

    Attributes:
        memory: Goes back to the system when nothing refers to it.
        address: Where it begins.
        registry: What it is registered with, if anything.
        used_at: When an array was last made of it, on `time.monotonic`'s clock.
    """

    __slots__ = ("address", "memory", "registry", "used_at")

    def __init__(self, size: int) -> None:
        self.memory = mmap(-1, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.registry: Registry | None = None
        self.used_at = 0.0


class SlabPool:
    """Slabs in sizes of powers of two. May be used by any thread.

    Attributes:
        limit_bytes: Memory that all slabs may take. Beyond it, arrays have memory of their own.
        held_bytes: Memory that they take, those without an array included.
        created: How many slabs were created.
    """

    def __init__(
        self,
        limit_bytes: int = MAX_SLAB_BYTES,
        registry: Registry | None = None,
        *,
        least_bytes: int = LEAST_ARRAY_BYTES,
    ) -> None:
        """Begins without slabs.

        Args:
            limit_bytes: Memory that all slabs may take.
            registry: Registers each slab; None if the runs are on the host.
            least_bytes: Smaller arrays have memory of their own.
        """
        self.limit_bytes, self.held_bytes, self.created = limit_bytes, 0, 0
        self._registry, self._least_bytes = registry, least_bytes
        # Slabs without an array, by the binary logarithm of their size; those that were used last at the end.
        self._idle = [deque[Slab]() for _ in range(ADDRESS_BITS)]
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Array:
        """An array like that of `numpy.empty`, in a slab unless it is small or the limit is reached."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes < self._least_bytes:
            return np.empty(shape, dtype)
        order = (nbytes - 1).bit_length()
        try:
            slab = self._idle[order].pop()
        except IndexError:
            if (created := self._create(1 << order)) is None:
                return np.empty(shape, dtype)
            slab = created
        slab.used_at = time.monotonic()
        memory: Any = (ctypes.c_char * (1 << order)).from_buffer(slab.memory)
        # Takes no lock, because the last view may go at any moment on any thread, which may hold the lock.
        finalize(memory, self._idle[order].append, slab)
        return np.ndarray(shape, dtype, memory)

    def _create(self, size: int) -> Slab | None:
        """A new slab; None if there is no room for it."""
        with self._lock:
            for idle in self._idle:
                while self.held_bytes + size > self.limit_bytes and self._free_stale(idle):
                    pass
            if self.held_bytes + size > self.limit_bytes:
                return None
            slab = Slab(size)
            self.held_bytes += size
            self.created += 1
            if self._registry is not None:
                try:
                    self._registry.register(slab.address, size)
                    slab.registry = self._registry
                except ProviderError as error:  # this slab and later ones are copied as other memory is
                    log.warning("host memory not registered", extra={"reason": str(error)})
                    self._registry = None
            return slab

    def _free_stale(self, idle: deque[Slab]) -> bool:
        """Frees the slab that was not used for the longest time, if that is long; returns whether it did."""
        try:
            slab = idle.popleft()
        except IndexError:
            return False
        if time.monotonic() - slab.used_at < STALE_SECONDS:
            idle.appendleft(slab)
            return False
        if slab.registry is not None:
            with suppress(ProviderError):
                slab.registry.unregister(slab.address)
        self.held_bytes -= len(slab.memory)
        return True
