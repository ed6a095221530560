"""From artifacts to answers: settings, engine, the gRPC surface and the process around them."""

import os

NAME = "attention-serving"
VERSION = "0.1.0"

# ONNX Runtime's Linux builds send model names and hashes to Microsoft unless this variable is set before the
# import. The default keeps them private; 0 in the environment restores the runtime's own default.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# gRPC's core would read and write sockets on four threads of its own. The transport has one thread for that,
# which takes less processor time. The core reads the variable when it is imported, and ignores names that it
# does not know.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
