"""NVIDIA GPUs: whether runs can go to one, and if not, why.

NVIDIA's driver is asked for its device first, which needs none of the libraries of the CUDA toolkit. Source:
CUDA Driver API, sections "Initialization", "Device Management", "Primary Context Management", "Context
Management", "Memory Management" and "Error Handling".

ONNX Runtime offers CUDA in its list of providers whenever it was built with it. If the provider's library
does not load, a session silently runs on the CPU. What it needs is therefore loaded one by one, to see why.
"""

import contextlib
import ctypes
import io
from functools import cache
from importlib import metadata

import numpy as np
import onnxruntime

from attention_serving.server.engine.run.provider import Provider, ProviderError

CUDA = Provider.CUDA.runtime
DRIVER = "libcuda.so.1"
SUCCESS = 0
MAX_NAME = 256
# CU_MEMHOSTREGISTER_PORTABLE: the memory is registered for every context.
PORTABLE = 1
# An ONNX model: y = x + x, for a float32 vector of one element; opset 13.
PROBE = (
    b'\x08\x08\x12\x00:5\n\x0e\n\x01x\n\x01x\x12\x01y"\x03Add\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12'
    b"\x04\n\x02\x08\x01b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\r"
)


@cache
def find_device() -> str:
    """The name of the device that runs go to: the first that the driver offers. It has computed something.

    Raises:
        ProviderError: CUDA cannot be used; the message gives the reason.
    """
    if CUDA.name not in onnxruntime.get_available_providers():
        raise ProviderError(_build())
    device = ask_driver()
    preload()
    _compute()
    return device


def ask_driver(library: str = DRIVER) -> str:
    """The name of the first device that this process may use; CUDA_VISIBLE_DEVICES selects among them.

    Args:
        library: File name of the driver's library.

    Raises:
        ProviderError: The driver is absent, does not work, or offers no device.
    """
    driver, handle = _first_device(library)
    name = ctypes.create_string_buffer(MAX_NAME)
    _call(driver, "cuDeviceGetName", name, MAX_NAME, handle)
    return name.value.decode(errors="replace")


def _first_device(library: str) -> tuple[ctypes.CDLL, ctypes.c_int]:
    """The driver, initialised, and its handle of the first device."""
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        raise ProviderError(
            f"NVIDIA's driver is not installed, or not visible in this container ({error})"
        ) from error
    count, handle = ctypes.c_int(), ctypes.c_int()
    _call(driver, "cuInit", 0)
    _call(driver, "cuDeviceGetCount", ctypes.byref(count))
    if count.value == 0:
        raise ProviderError("NVIDIA's driver offers no device to this process; see CUDA_VISIBLE_DEVICES")
    _call(driver, "cuDeviceGet", ctypes.byref(handle), 0)
    return driver, handle


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
    """Waits until the device has finished everything, without the GIL.

    Raises:
        ProviderError: Something has failed there.
    """
    _call_in_context("cuCtxSynchronize")


def _call_in_context(function: str, *arguments: object) -> None:
    """Calls the driver in the context in which ONNX Runtime computes."""
    driver, context = _primary_context(DRIVER)
    _call(driver, "cuCtxPushCurrent_v2", context)
    try:
        _call(driver, function, *arguments)
    finally:
        _call(driver, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@cache
def _primary_context(library: str) -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """The driver, and the primary context of the first device."""
    (driver, handle), context = _first_device(library), ctypes.c_void_p()
    _call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    return driver, context


def _call(driver: ctypes.CDLL, function: str, *arguments: object) -> None:
    status = getattr(driver, function)(*arguments)
    if status != SUCCESS:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode(errors="replace")
        raise ProviderError(f"NVIDIA's driver does not work: {function} returned {status}, {reason}")


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


def cuda_version() -> str:
    """The version of CUDA that the runtime was built for; empty without CUDA."""
    return str(onnxruntime.cuda_version or "")


def _build() -> str:
    """Why the runtime was built without CUDA."""
    installed = {str(package.metadata["Name"]).lower() for package in metadata.distributions()}
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
        (total,) = session.run(None, {"x": np.ones(1, np.float32)})
    except Exception as error:  # ONNX Runtime does not raise a specific type
        raise ProviderError(f"the device does not compute: {error}") from error
    if session.get_providers()[0] != CUDA.name:
        needed = f"CUDA {cuda_version()} and cuDNN 9" if cuda_version() else "CUDA and cuDNN"
        reason = preload() or "all of them were found"
        raise ProviderError(
            f"the libraries of CUDA do not load: {reason}; onnxruntime was built for {needed}"
        )
    if total.tolist() != [2.0]:
        raise ProviderError(f"the device computes 1 + 1 = {total.tolist()}")
