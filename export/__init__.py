"""From a PyTorch module or an ONNX file to an artifact: graphs, manifest, golden vectors, parity report.

PyTorch takes seconds to import, and `python -m export --help` must not wait for it. Therefore this file and
what it imports at import time (export.api, export.certificate, export.deployment, export.errors,
export.precision) do not import PyTorch; its functions import it when they are called.
"""

import os

# Without this, ONNX Runtime reports model names and hashes to its vendor (as in server/__init__.py).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export.api import check_module, export_module, export_onnx
from attention_serving.export.certificate import VERSION
from attention_serving.export.deployment.write import write_target
from attention_serving.export.errors import ArtifactExistsError, ExportError, ParityError
from attention_serving.export.precision import Precision

__all__ = [
    "VERSION",
    "ArtifactExistsError",
    "ExportError",
    "ParityError",
    "Precision",
    "Tolerance",
    "check_module",
    "export_module",
    "export_onnx",
    "write_target",
]
