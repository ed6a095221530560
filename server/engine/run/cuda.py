"""NVIDIA GPUs: whether runs can go to one, and if not, why; and host memory that the GPU copies by itself.

NVIDIA's driver is asked for its device first, which needs none of the libraries of the CUDA toolkit. Source:
CUDA Driver API, sections "Initialization", "Device Management" and "Error Handling".

ONNX Runtime offers CUDA in its list of providers whenever it was built with it. If the provider's library
does not load, a session silently runs on the CPU, and the reason is only in the runtime's log.

A GPU copies page-locked memory by itself, at the full rate of the bus, while kernels of other runs compute.
To lock pages takes longer than many a run, so that memory is kept for later runs.
"""

import contextlib
import ctypes
import io
import logging
import mmap
import re
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from math import prod

import numpy as np
import onnxruntime
from numpy.typing import DTypeLike

from attention_serving.server.engine.run.provider import Provider, ProviderError
from attention_serving.server.engine.types import Array

log = logging.getLogger(__name__)
CUDA = Provider.CUDA.runtime
DRIVER = "libcuda.so.1"
SUCCESS = 0
MAX_NAME = 256
# CUdevice_attribute
MAJOR, MINOR = 75, 76
# An ONNX model: y = x + x, for a float32 vector of one element; opset 13.
PROBE = (
    b'\x08\x08\x12\x00:5\n\x0e\n\x01x\n\x01x\x12\x01y"\x03Add\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12'
    b"\x04\n\x02\x08\x01b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\r"
)
# Opens a session on CUDA with the runtime's log on standard error. It is a process of its own, because the
# log is written by the runtime's native code, and because to load the provider's library in another way than
# the runtime does would make it unusable in this process.
DIAGNOSIS = """
import onnxruntime, sys
onnxruntime.set_default_logger_severity(2)
onnxruntime.preload_dlls()
onnxruntime.InferenceSession(sys.stdin.buffer.read(), providers=[sys.argv[1]], enable_fallback=0)
"""
DIAGNOSIS_SECONDS = 60
# What the runtime's log says if the provider cannot be used, most specific first.
_REASONS = (
    r"(?<=Failed to load library )\S+ with error: .+",
    r"(?<=Failed to load shared library )\S+ with error: .+",
    r"Error loading .+",
    r"CUDA (?:failure|error) .+",
    r"Failed to register bundled CUDA plugin EP .+",
    r"Failed to create CUDAExecutionProvider.+",
)
SMALLEST_BLOCK = 1 << 16
# Of each size, this many free blocks are kept, and more if they need little memory.
KEPT_BLOCKS, KEPT_BYTES = 4, 128 << 20
# cudaHostRegisterPortable: for all contexts of the process. Source: CUDA Runtime API, "Memory Management".
PORTABLE = 1


@dataclass(frozen=True)
class CudaDevice:
    """A device that the driver offers to this process.

    Attributes:
        name: Product name.
        memory_bytes: Total memory.
        compute_capability: Generation of the architecture, such as 9.0.
    """

    name: str
    memory_bytes: int
    compute_capability: str


@cache
def find_device() -> CudaDevice:
    """The device that runs go to: the first that the driver offers. It has computed something.

    Raises:
        ProviderError: CUDA cannot be used; the message gives the reason.
    """
    if CUDA.name not in onnxruntime.get_available_providers():
        raise ProviderError(_build())
    device = ask_driver()
    preload()
    _compute()
    return device


def ask_driver(library: str = DRIVER) -> CudaDevice:
    """The first device that this process may use; CUDA_VISIBLE_DEVICES selects among them.

    Args:
        library: File name of the driver's library.

    Raises:
        ProviderError: The driver is absent, does not work, or offers no device.
    """
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        raise ProviderError(
            f"NVIDIA's driver is not installed, or not visible in this container ({error})"
        ) from error
    count, handle, major, minor = (ctypes.c_int() for _ in range(4))
    memory, name = ctypes.c_size_t(), ctypes.create_string_buffer(MAX_NAME)
    _call(driver, "cuInit", 0)
    _call(driver, "cuDeviceGetCount", ctypes.byref(count))
    if count.value == 0:
        raise ProviderError("NVIDIA's driver offers no device to this process; see CUDA_VISIBLE_DEVICES")
    _call(driver, "cuDeviceGet", ctypes.byref(handle), 0)
    _call(driver, "cuDeviceGetName", name, MAX_NAME, handle)
    _call(driver, "cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
    _call(driver, "cuDeviceGetAttribute", ctypes.byref(major), MAJOR, handle)
    _call(driver, "cuDeviceGetAttribute", ctypes.byref(minor), MINOR, handle)
    return CudaDevice(name.value.decode(errors="replace"), memory.value, f"{major.value}.{minor.value}")


def _call(driver: ctypes.CDLL, function: str, *arguments: object) -> None:
    status = getattr(driver, function)(*arguments)
    if status != SUCCESS:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode(errors="replace")
        raise ProviderError(f"NVIDIA's driver does not work: {function} returned {status}, {reason}")


def why_not() -> str:
    """Why CUDA cannot be used."""
    try:
        find_device()
    except ProviderError as error:
        return str(error)
    return "the runtime's log gives no reason"


@cache
def preload() -> str:
    """Loads the libraries of CUDA and cuDNN from their Python packages, once, if the runtime needs them.

    Returns:
        What could not be loaded; empty if everything was. The system's libraries may take its place.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        onnxruntime.preload_dlls()
    return " ".join(printed.getvalue().split())


def load_error(log: str) -> str:
    """The reason in the runtime's log why a provider cannot be used; empty if there is none."""
    found = (re.search(pattern, log) for pattern in _REASONS)
    return next((match[0].strip() for match in found if match), "")


def cuda_version() -> str:
    """The version of CUDA that the runtime was built for; empty without CUDA."""
    return str(onnxruntime.cuda_version or "")


def _build() -> str:
    """Why the runtime was built without CUDA."""
    installed = {str(found.metadata["Name"]).lower() for found in metadata.distributions()}
    if {CUDA.package, Provider.CPU.runtime.package} <= installed:
        return (
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other; uninstall both,"
            " then install onnxruntime-gpu"
        )
    name, version = onnxruntime.package_name or "onnxruntime", onnxruntime.__version__
    return f"{name} {version} is built without CUDA; install {CUDA.package} in its place"


def _compute() -> None:
    """Computes something on the device.

    Raises:
        ProviderError: The device or its libraries do not work.
    """
    try:
        session = onnxruntime.InferenceSession(PROBE, providers=[CUDA.name], enable_fallback=0)
        (found,) = session.run(None, {"x": np.ones(1, np.float32)})
    except Exception as error:  # ONNX Runtime does not raise a specific type
        raise ProviderError(f"the device does not compute: {error}") from error
    if session.get_providers()[0] != CUDA.name:
        raise ProviderError(_diagnosis())
    if found.tolist() != [2.0]:
        raise ProviderError(f"the device computes 1 + 1 = {found.tolist()}")


def _diagnosis() -> str:
    """Why a session ran on the CPU."""
    reason = load_error(runtime_log()) or preload() or "the runtime's log gives no reason"
    needed = f"CUDA {cuda_version()} and cuDNN 9" if cuda_version() else "CUDA and cuDNN"
    return f"the libraries of CUDA do not load: {reason}; onnxruntime was built for {needed}"


def runtime_log() -> str:
    """What the runtime logs when another process opens a session on CUDA."""
    command = [sys.executable, "-c", DIAGNOSIS, CUDA.name]
    try:
        ended = subprocess.run(  # noqa: S603 - this very interpreter
            command, input=PROBE, capture_output=True, timeout=DIAGNOSIS_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (ended.stdout + ended.stderr).decode(errors="replace")


class Block(mmap.mmap):
    """Memory of whole pages that may be locked."""

    is_locked = False

    @property
    def address(self) -> int:
        """Where it begins."""
        return int(np.frombuffer(self, np.uint8).ctypes.data)


class HostMemory:
    """Makes arrays in page-locked memory. May be used by several threads at once.

    The memory of an array is used again when neither the array nor a view of it is left. Memory that cannot
    be locked works too, but slower.
    """

    def __init__(self, library: str) -> None:
        """Loads CUDA's runtime library, which ONNX Runtime uses too. If it does not load, nothing is locked.

        Args:
            library: Its file name, such as libcudart.so.13.
        """
        # A deque for each size of block: appending and popping are atomic. A lock could be taken twice by one
        # thread, because the collector may end arrays at any time.
        self._free: dict[int, deque[Block]] = {}
        self._library: ctypes.CDLL | None = None
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            log.warning("host memory is not page-locked", extra={"library": library, "reason": str(error)})

    def empty(self, shape: Sequence[int], data_type: DTypeLike) -> Array:
        """An array of that shape and type, whose values are undefined."""
        dtype = np.dtype(data_type)
        count = prod(shape) * dtype.itemsize
        block = self._take(block_size(count))
        whole = np.frombuffer(block, np.uint8)  # views refer to this array, and not to the block alone
        weakref.finalize(whole, self._give_back, block).atexit = False
        return whole[:count].view(dtype).reshape(shape)

    def _take(self, size: int) -> Block:
        try:
            return self._free[size].pop()
        except (KeyError, IndexError):
            block = Block(-1, size)
            block.is_locked = self._lock(block.address, size)
            return block

    def _give_back(self, block: Block) -> None:
        size = len(block)
        free = self._free.setdefault(size, deque())
        if len(free) < KEPT_BLOCKS or size * (len(free) + 1) <= KEPT_BYTES:
            free.append(block)
        elif block.is_locked:  # the system gets the memory when nothing refers to the block
            self._unlock(block.address)

    def _lock(self, address: int, size: int) -> bool:
        if self._library is None:
            return False
        where, length = ctypes.c_void_p(address), ctypes.c_size_t(size)
        if self._library.cudaHostRegister(where, length, PORTABLE) == SUCCESS:
            return True
        # The library keeps the error until it is asked, and ONNX Runtime would take it for one of its own.
        self._library.cudaGetLastError()
        return False

    def _unlock(self, address: int) -> None:
        if self._library is not None:
            self._library.cudaHostUnregister(ctypes.c_void_p(address))


@cache
def host_memory() -> HostMemory:
    """Memory of this process for the inputs and outputs of all sessions."""
    return HostMemory(f"libcudart.so.{cuda_version().split('.')[0]}")


def block_size(count: int) -> int:
    """The size of the block for so many bytes: four sizes for each power of two, so that few are unused."""
    if count <= SMALLEST_BLOCK:
        return SMALLEST_BLOCK
    step = 1 << ((count - 1).bit_length() - 3)
    return -(-count // step) * step
