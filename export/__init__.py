"""From a PyTorch module to an artifact: ONNX graphs, manifest, golden vectors and parity report.

`export.manifest` reads artifacts without PyTorch; everything else here writes them.
"""

import os

# As in server/__init__.py: ONNX Runtime is not to report the models that pass through it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
