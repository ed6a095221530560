"""Host memory for runs on a device: used again, and never while an array refers to it."""

import ctypes
import gc
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_serving.server.engine.run.cuda import (
    KEPT_BLOCKS,
    KEPT_BYTES,
    SMALLEST_BLOCK,
    HostMemory,
    block_size,
)

PAGE = 4096


class CountedMemory(HostMemory):
    """Counts what is locked, without CUDA; refuses to lock if it is told to."""

    def __init__(self, *, locks: bool = True) -> None:
        super().__init__("libc.so.6")
        self._locks = locks
        self.locked: dict[int, int] = {}
        self.total = 0

    @property
    def free_bytes(self) -> int:
        """Memory that is kept for later arrays."""
        return sum(size * len(blocks) for size, blocks in self._free.items())

    def _lock(self, address: int, size: int) -> bool:
        assert address % PAGE == size % PAGE == 0
        if self._locks:
            self.locked[address] = size
            self.total += 1
        return self._locks

    def _unlock(self, address: int) -> None:
        del self.locked[address]


@given(st.integers(0, 1 << 34))
def test_blocks_are_whole_pages_and_at_most_a_quarter_is_unused(count: int) -> None:
    size = block_size(count)
    assert size >= max(count, SMALLEST_BLOCK)
    assert size % PAGE == 0
    assert size <= max(SMALLEST_BLOCK, 1.25 * count)


def test_memory_is_used_again_once_no_view_is_left() -> None:
    memory = CountedMemory()
    view = memory.empty((8, 16), np.float32)[2:, :3]
    view[...] = 7
    other = memory.empty((8, 16), np.float32)
    other[...] = 1
    assert (view == 7).all()
    assert (memory.total, memory.free_bytes) == (2, 0)
    del view, other
    gc.collect()
    assert memory.free_bytes == 2 * SMALLEST_BLOCK
    assert memory.empty((3,), np.int64).shape == (3,)
    assert memory.total == 2


@pytest.mark.parametrize(
    ("shape", "data_type"),
    [((2, 0, 4), np.float32), ((), np.int64), ((1, 1, 3, 3), np.bool_), ((40, 1000), np.float16)],
    ids=["empty axis", "a number", "flags", "large"],
)
def test_every_shape_and_type(shape: tuple[int, ...], data_type: type) -> None:
    array = CountedMemory().empty(shape, data_type)
    assert (array.shape, array.dtype) == (shape, np.dtype(data_type))
    assert array.flags.c_contiguous
    array[...] = 1
    assert (array == 1).all()


def test_large_blocks_are_not_kept_beyond_a_few() -> None:
    memory = CountedMemory()
    arrays = [memory.empty((KEPT_BYTES // 2,), np.uint8) for _ in range(KEPT_BLOCKS + 2)]
    arrays.clear()
    gc.collect()
    assert memory.free_bytes == KEPT_BLOCKS * KEPT_BYTES // 2
    assert len(memory.locked) == KEPT_BLOCKS


def test_memory_that_cannot_be_locked_works_too() -> None:
    memory = CountedMemory(locks=False)
    for _ in range(KEPT_BLOCKS + 2):
        memory.empty((KEPT_BYTES,), np.uint8)[:1] = 1
    assert memory.total == 0


def test_without_the_library_nothing_is_locked_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    memory = HostMemory("libcudart.so.999")
    assert memory.empty((3,), np.float32).shape == (3,)
    assert not memory._lock(0, PAGE)
    memory._unlock(0)
    (record,) = caplog.records
    assert (record.message, vars(record)["library"]) == ("host memory is not page-locked", "libcudart.so.999")


# Functions of the CUDA Runtime API with its signatures. They note what they were called with.
RUNTIME = """
#include <stddef.h>
void *address; size_t size; unsigned flags; int asked;
int cudaHostRegister(void *a, size_t s, unsigned f) {
    address = a; size = s; flags = f;
    return s > 1UL << 40;
}
int cudaHostUnregister(void *a) { if (a == address) address = NULL; return 0; }
int cudaGetLastError(void) { asked++; return 0; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_library_of_cuda_gets_addresses_and_sizes_of_64_bits(tmp_path: Path) -> None:
    source, library = tmp_path / "runtime.c", tmp_path / "runtime.so"
    source.write_text(RUNTIME)
    command = ["cc", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    noted, memory = ctypes.CDLL(str(library)), HostMemory(str(library))
    address = (1 << 46) + PAGE
    assert memory._lock(address, 1 << 33)
    assert ctypes.c_void_p.in_dll(noted, "address").value == address
    assert ctypes.c_size_t.in_dll(noted, "size").value == 1 << 33
    assert ctypes.c_uint.in_dll(noted, "flags").value == 1
    memory._unlock(address)
    assert ctypes.c_void_p.in_dll(noted, "address").value is None
    assert not memory._lock(address, 1 << 41)
    # The error of the refusal was fetched, so that nobody else finds it.
    assert ctypes.c_int.in_dll(noted, "asked").value == 1


def test_threads_do_not_share_memory() -> None:
    memory = CountedMemory()

    def body(number: int) -> bool:
        ok = True
        for _ in range(200):
            array = memory.empty((64, 64), np.float32)
            array.fill(number)
            ok &= bool((array == number).all())
        return ok

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(body, range(4)))
