"""The methods of the gRPC server. It does not import ONNX Runtime.

calls.py          the life of every call: admission, message, memory, handling, reply, report
methods.py        every method that the server answers
attention/        attention.v1: handlers and codec
open_inference/   the Open Inference Protocol: handlers and codec
request_cache.py  requests that are recognised by their bytes
"""
