"""From a PyTorch module to an artifact: ONNX graphs, manifest, golden vectors and parity report.

`export.manifest` reads artifacts without PyTorch; everything else here writes them.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from export.module import export_module

__all__ = ["export_module"]

# As in server/__init__.py: ONNX Runtime is not to report the models that pass through it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def __getattr__(name: str) -> Any:
    """Imports PyTorch when the exporter is asked for, and not when a manifest is read."""
    if name != "export_module":
        raise AttributeError(f"module 'export' has no attribute {name!r}")
    from export.module import export_module  # noqa: PLC0415

    return export_module
