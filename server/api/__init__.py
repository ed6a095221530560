"""The methods of the gRPC server. It does not import ONNX Runtime.

calls.py          the life of every call: admission, message, memory, handling, reply, report
methods.py        every method that the server answers
inference.py      how a request of inference is answered, in both protocols, and recognised by its bytes
attention/        attention.v1: methods and codec
open_inference/   the Open Inference Protocol: methods and codec
"""
