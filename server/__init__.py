"""From artifacts to answers: settings, engine, the gRPC surface and the process around them."""

VERSION = "0.1.0"
