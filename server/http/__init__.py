"""The HTTP/REST face of the Open Inference Protocol: a process that asks the gRPC server.

It translates requests to the messages of protos/inference/open_inference.proto and replies back to JSON and
binary tensors. Models, limits, rights and metrics are those of the gRPC server.

application.py    routes and error pages, in Starlette
inference.py      the endpoint of inference: body, decode, call, encode
methods.py        every other method: its routes, its request and its answer
tensors.py        elements of tensors as JSON
request.py, response.py    bodies of inference as messages, and back
body.py           reads a body within the limits of size and time
connection.py     uvicorn's connection, with limits of time and number
backend.py        the channels to the gRPC server
process.py        starts the process beside a server, and replaces it if it ends
"""
