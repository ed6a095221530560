"""The Open Inference Protocol over HTTP: a process that translates requests to calls of the gRPC server.

Requests become messages of protos/inference/open_inference.proto, and replies become JSON and binary tensors.
Models, limits, rights and metrics are those of the gRPC server.

app.py         the routes as a Starlette router; errors as answers; the pages
routes.py      the table of all routes; openapi.py: its description
infer.py       bodies of inference as messages, and replies as bodies
contexts.py    stored contexts
text_models.py endpoints of OpenAI, Cohere and TEI
schemas.py     pydantic models of JSON bodies, and JSON of messages
exchange.py    one request: its body, call and answer; what requests share: the gRPC server, memory, places
server.py      uvicorn, with limits of time and number; the program of the process
child.py       this process as the server sees it, and where it finds the gRPC server
"""
