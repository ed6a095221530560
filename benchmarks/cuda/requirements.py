"""What each step imports beside this repository, and what of it is missing. Imports nothing of it."""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec

# Python packages by the modules that they contain.
BASE: dict[str, str] = {
    "cryptography": "cryptography",
    "numpy": "numpy",
    "onnx": "onnx",
    "onnxruntime": "onnxruntime-gpu",
    "pydantic": "pydantic",
    "safetensors": "safetensors",
    "securesystemslib": "securesystemslib",
    "tokenizers": "tokenizers",
    "torch": "torch",
}
SERVER: dict[str, str] = {
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "ml_dtypes": "ml-dtypes",
    "opentelemetry": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
    "typer": "typer",
}
EXPORT: dict[str, str] = {"onnx_ir": "onnx-ir", "onnxscript": "onnxscript"}
PLOTS: dict[str, str] = {"matplotlib": "matplotlib"}
# What a step needs in addition to BASE.
OF_STEP: dict[str, dict[str, str]] = {"export": EXPORT, "service": SERVER}


def missing(modules: Mapping[str, str]) -> list[str]:
    """The packages whose modules cannot be found."""
    return sorted({package for module, package in modules.items() if not _exists(module)})


def sentence(packages: Iterable[str]) -> str:
    """What to do about missing packages."""
    names = ", ".join(packages)
    return f"missing Python packages: {names}; install them, or carry their wheels to this machine"


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
