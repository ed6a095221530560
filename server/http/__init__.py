"""The Open Inference Protocol over HTTP: a process that translates requests to calls of the gRPC server.

Requests become messages of protos/inference/open_inference.proto, and replies become JSON and binary tensors.
Models, limits, rights and metrics are those of the gRPC server.

server.py      listens, answers requests by the table, drains; the program of the process
connection.py  HTTP/1.1: connections, and requests with their bodies, calls and replies
backend.py     what requests share: the connections to the gRPC server, memory, places
routes.py      the table of all routes, and its description
infer.py       bodies of inference and of contexts as messages, and replies as bodies
text_models.py endpoints of OpenAI, Cohere and TEI
"""
