"""The gRPC surface. It does not import ONNX Runtime.

The path of a request: bytes, `Route.read`, the handler of its service, which resolves the model, decodes and
submits; then the engine; then the codec's encode, and `Route.write` for a reply that is still a message.

transport/        calls as gRPC delivers them: one seam, two adapters
calls/            the kinds of call, and the one way to wait for a deferred reply
routes.py         the route table: every method that the server answers
dispatcher.py     finds a call's route and applies the limits of concurrency
attention/        attention.v1: handlers and codec
open_inference/   the Open Inference Protocol: handlers and codec
"""
