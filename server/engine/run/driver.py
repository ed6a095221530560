"""NVIDIA's driver: which GPUs a process may use, which of them each worker uses, and page-locked memory.

Needs neither ONNX Runtime nor the CUDA toolkit. Source: CUDA Driver API, sections "Initialization", "Device
Management", "Primary Context Management", "Context Management", "Memory Management" and "Error Handling";
CUDA C++ Programming Guide, "CUDA Environment Variables".
"""

import ctypes
import os
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple
from uuid import UUID

from attention_serving.server.engine.run.provider import ProviderError

LIBRARY = "libcuda.so.1"
SUCCESS = 0
MAX_NAME, UUID_BYTES = 256, 16
# CU_MEMHOSTREGISTER_PORTABLE: the memory is registered for every context.
PORTABLE = 1
VISIBLE = "CUDA_VISIBLE_DEVICES"
# What the UUID of a MIG instance begins with, and what its name contains.
MIG = "MIG"


class Gpu(NamedTuple):
    """A GPU, or an instance of one that is divided by MIG.

    Attributes:
        name: As the driver names it, such as NVIDIA H100 80GB HBM3.
        uuid: As `nvidia-smi -L` shows it.
    """

    name: str
    uuid: str


def gpus(library: str = LIBRARY) -> list[Gpu]:
    """The GPUs that this process may use, at least one; CUDA_VISIBLE_DEVICES selects among them.

    Args:
        library: File name of the driver's library.

    Raises:
        ProviderError: The driver is absent, does not work, or offers no device.
    """
    driver, count = _open(library), ctypes.c_int()
    _call(driver, "cuDeviceGetCount", ctypes.byref(count))
    if count.value == 0:
        raise ProviderError(f"NVIDIA's driver offers no device to this process; see {VISIBLE}")
    return [_gpu(driver, ordinal) for ordinal in range(count.value)]


def visible_devices(library: str = LIBRARY, environment: Mapping[str, str] = os.environ) -> list[str]:
    """For each GPU that this process may use, the value of CUDA_VISIBLE_DEVICES that leaves it alone.

    Empty if the driver offers none. Of several MIG instances in the variable, the driver enumerates only one.
    """
    try:
        count = len(gpus(library))
    except ProviderError:
        return []
    listed = environment.get(VISIBLE)
    if listed is None:
        return [str(index) for index in range(count)]
    # An element that is not a device hides those after it.
    elements = [element.strip() for element in listed.split(",")]
    return [element for element in elements if element.startswith(MIG)] or elements[:count]


def _gpu(driver: ctypes.CDLL, ordinal: int) -> Gpu:
    handle, buffer, uuid = (
        ctypes.c_int(),
        ctypes.create_string_buffer(MAX_NAME),
        (ctypes.c_ubyte * UUID_BYTES)(),
    )
    _call(driver, "cuDeviceGet", ctypes.byref(handle), ordinal)
    _call(driver, "cuDeviceGetName", buffer, MAX_NAME, handle)
    _call(driver, "cuDeviceGetUuid_v2", uuid, handle)  # of an instance, if the GPU is divided
    name = buffer.value.decode(errors="replace")
    return Gpu(name, f"{MIG if MIG in name.split() else 'GPU'}-{UUID(bytes=bytes(uuid))}")


def register(address: int, size: int) -> None:
    """Locks the pages of host memory, so that the device copies them directly.

    Raises:
        ProviderError: The driver refuses.
    """
    _call_in_context("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size), PORTABLE)


def unregister(address: int) -> None:
    """Unlocks pages again; see `register`."""
    _call_in_context("cuMemHostUnregister", ctypes.c_void_p(address))


def synchronize() -> None:
    """Waits until the first device has finished everything, without the GIL.

    Raises:
        ProviderError: Something has failed there.
    """
    _call_in_context("cuCtxSynchronize")


def _call_in_context(function: str, *arguments: object) -> None:
    """Calls the driver in the context in which ONNX Runtime computes."""
    driver, context = _primary_context(LIBRARY)
    _call(driver, "cuCtxPushCurrent_v2", context)
    try:
        _call(driver, function, *arguments)
    finally:
        _call(driver, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@cache
def _primary_context(library: str) -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """The driver, and the primary context of the first device."""
    driver, handle, context = _open(library), ctypes.c_int(), ctypes.c_void_p()
    _call(driver, "cuDeviceGet", ctypes.byref(handle), 0)
    _call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    return driver, context


def _open(library: str) -> ctypes.CDLL:
    """The driver, initialised."""
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        raise ProviderError(
            f"NVIDIA's driver is not installed, or not visible in this container ({error})"
        ) from error
    _call(driver, "cuInit", 0)
    return driver


def _call(driver: ctypes.CDLL, function: str, *arguments: object) -> None:
    status = getattr(driver, function)(*arguments)
    if status != SUCCESS:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode(errors="replace")
        raise ProviderError(f"NVIDIA's driver does not work: {function} returned {status}, {reason}")
