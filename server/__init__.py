"""From artifacts to answers: settings, engine, the gRPC surface and the process around them."""

import os

VERSION = "0.1.0"

# ONNX Runtime's Linux builds report model names and hashes to their vendor unless told not to before they
# are imported. What is served here is nobody else's business; whoever disagrees sets it to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
