"""Sends HTTP requests as programs do, and as no program should."""

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

HOST = "127.0.0.1"
# Limits of the HTTP server that tests share.
MAX_BYTES, PLACES = 1 << 20, 2
Array = np.ndarray[Any, np.dtype[Any]]
INFER = "/v2/models/m/infer"


class Answer(NamedTuple):
    """Status, headers in lower case, and body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        assert self.headers["content-type"] == "application/json"
        assert next(iter(self.json)) == "error"
        return str(self.json["error"])


def ask(
    port: int,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "",
    host: str = HOST,
) -> Answer:
    """One request on its own connection. A body that is neither bytes nor an iterator is sent as JSON."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
    try:
        data: Any = body if body is None or isinstance(body, bytes | Iterator) else json.dumps(body).encode()
        connection.request(method or ("GET" if body is None else "POST"), path, data, dict(headers or {}))
        return read(connection.getresponse())
    finally:
        connection.close()


def read(response: http.client.HTTPResponse) -> Answer:
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, headers, response.read())


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection((HOST, port), timeout=60) as connection:
        yield connection


def answer_on(connection: socket.socket) -> Answer:
    """The next response on a connection."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return read(response)


def head(path: str, *headers: str, method: str = "POST") -> bytes:
    """The request line and the headers."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {HOST}", *headers, "", ""]).encode()


def tensor(name: str, array: Array) -> dict[str, Any]:
    """An input whose elements are JSON."""
    return {"name": name, "shape": list(array.shape), "datatype": "FP32", "data": array.tolist()}


def binary_body(document: Mapping[str, Any], *data: bytes) -> tuple[bytes, dict[str, str]]:
    """A body of JSON and binary tensors, and the header that goes with it."""
    json_part = json.dumps(document).encode()
    return b"".join([json_part, *data]), {"Inference-Header-Content-Length": str(len(json_part))}


# A good request of inference.
REQUEST = {"inputs": [tensor("query", np.arange(24, dtype=np.float32).reshape(2, 3, 4))]}


def post(connection: socket.socket, document: object = REQUEST) -> None:
    """Sends a request of inference, whose answer is read later."""
    body = json.dumps(document).encode()
    connection.sendall(head(INFER, f"Content-Length: {len(body)}") + body)
