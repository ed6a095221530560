"""The Open Inference Protocol over HTTP: a process that translates requests to calls of the gRPC server.

Requests become messages of protos/inference/open_inference.proto, and replies become JSON and binary tensors.
Models, limits, rights and metrics are those of the gRPC server.

application.py        the routes, as a Starlette application
inference.py          the endpoint of inference: body, decode, call, encode
infer_request.py      bodies of inference as messages; infer_response.py: replies as bodies
tensors.py            elements of tensors as JSON
methods.py            every other method: its routes, request and answer
authorization.py      asks the gRPC server who may call, before a large body is read
explorer.py           the page at /explore, and the list of models that it shows
context.py            what endpoints share: limits, and errors as answers
body.py               reads a body within the limits of size, memory and time
connection.py         uvicorn's connection, with limits of time and number
backend.py            the channels to the gRPC server
process.py, child.py  the process beside a server, from both sides; it is replaced if it ends
"""
