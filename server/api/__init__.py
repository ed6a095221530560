"""The methods of the gRPC server. It does not import ONNX Runtime.

calls.py          the life of every call: admission, message, memory, handling, reply, report
methods.py        every method that the server answers
inference.py      how a request of inference is answered, in both protocols, and cached by its bytes
attention/        attention.v1: requests, responses, handlers
open_inference/   the Open Inference Protocol: requests, responses, handlers
tei.py            tei.v1, with the bodies of TEI's JSON
text_bodies.py    JSON bodies of requests to text models, for tei.v1 and for HTTP
schemas.py        pydantic models of JSON bodies, and JSON of messages
wire.py           what is extracted from the bytes of messages, and appended to them
tensors.py        tensors of both protocols as arrays and back
"""
