"""A method for the HTTP process only: whether the caller of a request may make the call that it stands for.

The HTTP process knows no tokens. Before it reads a large body, it passes the credentials on to this method,
which answers as the method itself would before it receives a message. It is not part of the protocols, is not
listed by reflection, and tells callers nothing that they would not learn from that method.
"""

from google.protobuf.wrappers_pb2 import StringValue

METHOD = "/attention.internal.Access/Check"
# Between the full name of the method, which has none, and the name of the model.
SEPARATOR = "\n"


def question(method: str, model: str) -> bytes:
    """The request: whether a method may be called, for a model if the name is not empty."""
    data: bytes = StringValue(value=f"{method}{SEPARATOR}{model}").SerializeToString()
    return data
