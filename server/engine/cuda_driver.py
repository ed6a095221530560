"""Asks NVIDIA's driver for its devices. Needs none of the libraries of the CUDA toolkit.

Source: CUDA Driver API, sections "Initialization", "Device Management" and "Error Handling".
"""

import ctypes
from dataclasses import dataclass

from attention_serving.server.engine.provider import ProviderError

LIBRARY = "libcuda.so.1"
SUCCESS = 0
MAX_NAME = 256
# CUdevice_attribute
MAJOR, MINOR = 75, 76


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


def find_devices(library: str = LIBRARY) -> list[CudaDevice]:
    """The devices that this process may use, at least one; CUDA_VISIBLE_DEVICES selects among them.

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
    _call(driver, "cuInit", 0)
    count = ctypes.c_int()
    _call(driver, "cuDeviceGetCount", ctypes.byref(count))
    if count.value == 0:
        raise ProviderError("NVIDIA's driver offers no device to this process; see CUDA_VISIBLE_DEVICES")
    return [_device(driver, ordinal) for ordinal in range(count.value)]


def _device(driver: ctypes.CDLL, ordinal: int) -> CudaDevice:
    handle, memory = ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(MAX_NAME)
    _call(driver, "cuDeviceGet", ctypes.byref(handle), ordinal)
    _call(driver, "cuDeviceGetName", name, MAX_NAME, handle)
    _call(driver, "cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
    major, minor = (_attribute(driver, attribute, handle) for attribute in (MAJOR, MINOR))
    return CudaDevice(name.value.decode(errors="replace"), memory.value, f"{major}.{minor}")


def _attribute(driver: ctypes.CDLL, attribute: int, handle: ctypes.c_int) -> int:
    found = ctypes.c_int()
    _call(driver, "cuDeviceGetAttribute", ctypes.byref(found), attribute, handle)
    return found.value


def _call(driver: ctypes.CDLL, function: str, *arguments: object) -> None:
    status = getattr(driver, function)(*arguments)
    if status != SUCCESS:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode(errors="replace")
        raise ProviderError(f"NVIDIA's driver does not work: {function} returned {status}, {reason}")
