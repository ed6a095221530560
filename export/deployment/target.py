"""The servers and runtimes that an artifact can be deployed to beside this project's own server."""

from enum import StrEnum


class DeploymentTarget(StrEnum):
    """Another server or runtime."""

    TRITON = "triton"
    """NVIDIA Triton: `<repository>/<name>/config.pbtxt`, beside the versions of the model."""
    TORCHSERVE = "torchserve"
    """TorchServe: `<repository>/<name>/torchserve/<version>/<name>.mar`."""
    ONNX = "onnx"
    """Any ONNX Runtime: `model.onnx`, `run.py` and `golden.npz` in `<repository>/<name>/onnx/<version>/`."""
