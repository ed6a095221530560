"""From a PyTorch module to an artifact: ONNX graphs, manifest, golden vectors and parity report."""

import os

# ONNX Runtime must not report the models that pass through it to its vendor (as in server/__init__.py).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from export.module import export_module

__all__ = ["export_module"]
