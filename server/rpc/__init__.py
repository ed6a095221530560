"""The gRPC surface: services, codecs, status mapping, interceptor. Knows no ONNX Runtime.

decode turns a message into the engine's request, encode its result into a message; nothing in
between sees protobuf, so that another transport needs a folder like this one and no other change.
"""
