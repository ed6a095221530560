"""NVIDIA GPUs: whether runs can go to one, and if not, why.

NVIDIA's driver is asked for its device first, which needs none of the libraries of the CUDA toolkit.

ONNX Runtime offers CUDA in its list of providers whenever it was built with it. If the provider's library
does not load, a session silently runs on the CPU. What it needs is therefore loaded one by one, to see why.
"""

import contextlib
import io
from functools import cache
from importlib import metadata

import numpy as np
import onnxruntime

from attention_serving.server.engine.run.driver import Gpu, gpus
from attention_serving.server.engine.run.provider import Provider, ProviderError

CUDA = Provider.CUDA.runtime
# An ONNX model: y = x + x, for a float32 vector of one element; opset 13.
PROBE = (
    b'\x08\x08\x12\x00:5\n\x0e\n\x01x\n\x01x\x12\x01y"\x03Add\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12'
    b"\x04\n\x02\x08\x01b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\r"
)


@cache
def find_device() -> Gpu:
    """The device that runs go to: the first that the driver offers. It has computed something.

    Raises:
        ProviderError: CUDA cannot be used; the message gives the reason.
    """
    if CUDA.name not in onnxruntime.get_available_providers():
        raise ProviderError(_build())
    device, *_ = gpus()
    preload()
    _compute()
    return device


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
