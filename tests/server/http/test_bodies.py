"""Bodies: sizes, compression, slowness; and requests that are refused before a call of the gRPC server."""

import gzip
import json
import select
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from attention_serving.server.http.connection import LARGE_BYTES, run
from tests.server.http.clients import INFER, MAX_BYTES, REQUEST, answer_on, ask, connected, head, tensor
from tests.server.http.scripted import Scripted, front


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_the_size_of_a_body(port: int, chunked: bool) -> None:
    def sent(size: int) -> Any:
        return ask(port, INFER, iter([b" " * (size - 1), b" "]) if chunked else b" " * size)

    assert sent(MAX_BYTES).error.startswith("body: is not JSON")
    answer = sent(MAX_BYTES + 1)
    assert (answer.status, answer.error) == (413, f"the body is larger than the limit of {MAX_BYTES} bytes")


@pytest.mark.usefixtures("scripted")
def test_an_endless_body_is_not_read_for_ever(port: int) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield bytes(MAX_BYTES)

    with suppress(ConnectionError):  # the answer may be lost with the connection, which this client deserves
        assert ask(port, INFER, endless()).status == 413


@pytest.mark.usefixtures("scripted")
def test_a_client_that_waits_to_be_asked_for_its_body(port: int) -> None:
    expect = "Expect: 100-continue"
    with connected(port) as connection:
        connection.sendall(head(INFER, expect, f"Content-Length: {MAX_BYTES + 1}"))
        assert answer_on(connection).status == 413
    with connected(port) as connection:
        connection.sendall(head(INFER, expect, "Content-Length: 2"))
        assert connection.recv(4096).startswith(b"HTTP/1.1 100 ")
        connection.sendall(b"{}")
        assert answer_on(connection).status == 400


@pytest.mark.parametrize(
    ("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)]
)
def test_a_compressed_chunked_body(scripted: Scripted, port: int, encoding: str, compress: Any) -> None:
    body = compress(json.dumps(REQUEST).encode())
    chunks = iter([body[at : at + 7] for at in range(0, len(body), 7)])
    assert ask(port, INFER, chunks, {"Content-Encoding": encoding}).status == 200
    compressed = scripted.next().request
    assert ask(port, INFER, REQUEST).status == 200
    assert scripted.next().request == compressed


def test_json_that_would_need_too_much_memory(shared_scripted: Scripted) -> None:
    with front(shared_scripted, max_in_flight_bytes=MAX_BYTES) as running:
        answer = ask(running.port, INFER, b"[" + b"[]," * 20_000 + b"[]]")
    assert answer.status == 413
    assert answer.error.startswith("the JSON could take ")


def test_bodies_share_the_memory(shared_scripted: Scripted) -> None:
    """A request may exceed the memory if it is alone; another is refused meanwhile."""
    with front(shared_scripted, max_in_flight_bytes=10_000) as running, connected(running.port) as first:
        first.sendall(head(INFER, "Content-Length: 30000") + b" " * 20_000)
        assert ask(running.port, "/v2/health/live").status == 200  # what was sent before has been read
        answer = ask(running.port, INFER, b" " * 9000)
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        first.sendall(b" " * 10_000)
        assert answer_on(first).status == 413  # the JSON alone could take more


async def test_work_on_large_bodies_leaves_the_event_loop() -> None:
    thread = threading.get_ident()
    assert await run(LARGE_BYTES, threading.get_ident) == thread
    assert await run(LARGE_BYTES + 1, threading.get_ident) != thread


def test_a_body_that_trickles(shared_scripted: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with (
        front(shared_scripted, message_timeout_seconds=0.5, log_requests="failed") as running,
        connected(running.port) as connection,
    ):
        connection.sendall(head(INFER, "Transfer-Encoding: chunked"))
        while not select.select([connection], [], [], 0.02)[0]:
            connection.sendall(b"1\r\n \r\n")
        answer = answer_on(connection)
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        assert answer.error == "the body did not arrive within 0.5 seconds"
        assert connection.recv(1) == b""
    assert [vars(record)["status"] for record in caplog.records if record.message == "http request"] == [408]


MODEL, CONTEXTS = "/v2/repository/models/m/load", "/v2/models/m/versions/2/contexts"
REGION = "/v2/systemsharedmemory/region/a/register"
MASK = {"name": "mask", "shape": [3], "datatype": "BOOL", "data": [True, False, True]}
BATCH = MASK | {"shape": [1, 3]}
SHARED = {"name": "key", "shape": [3, 4], "datatype": "FP32", "parameters": {"shared_memory_region": "a"}}
GZIP, SIZE = {"Content-Encoding": "gzip"}, "Inference-Header-Content-Length"
SIZES = ("0", "-1", "99999999999999999999", "100000", "٣".encode().decode("latin-1"))
INTEGERS = b'{"inputs":[{"name":"a","shape":[300000],"datatype":"INT64","data":[0%s]}]}' % (b",0" * 299_999)
NOT_ASCII = "authorization: contains characters other than printable ASCII"


def key(*shape: int, **members: str) -> dict[str, Any]:
    return tensor("key", np.zeros(shape, np.float32)) | members


def context(*inputs: object, **parameters: object) -> dict[str, object]:
    return {"parameters": parameters, "inputs": inputs}


# Path, body, headers, status, and the beginning of the error.
ROWS: list[tuple[str, Any, dict[str, str] | None, int, str]] = [
    (INFER, gzip.compress(bytes(100 * MAX_BYTES)), GZIP, 413, "the body is larger than the limit"),
    (INFER, b"{}", GZIP, 400, "Content-Encoding: the body is damaged"),
    (INFER, gzip.compress(b"{}")[:-4], GZIP, 400, "Content-Encoding: the compressed body ends too early"),
    (INFER, gzip.compress(b"{}") * 2, GZIP, 400, "Content-Encoding: data follow the compressed body"),
    (INFER, b"{}", {"Content-Encoding": "br"}, 415, "Content-Encoding: is 'br'; must be gzip, deflate or"),
    (INFER, b"{}", {"Content-Encoding": "x" * 500}, 415, f"Content-Encoding: is '{'x' * 100}'; must"),
    *((INFER, REQUEST, {SIZE: size}, 400, f"{SIZE}: ") for size in SIZES),
    (INFER, INTEGERS, None, 413, f"the tensors have 2400025 bytes as a message; the limit is {MAX_BYTES}"),
    ("/v2/repository/index", {"ready": 1}, None, 400, "ready: must be a valid boolean"),
    (MODEL, {"parameters": {"a": 1.5}}, None, 400, "parameters[a]: must be a value of the"),
    (REGION, {"key": "a"}, None, 400, "byte_size: is required"),
    ("/v2/logging", {}, None, 405, "/v2/logging: the method is POST; must be GET, HEAD"),
    ("/v2/models", None, None, 404, "/v2/models: there is no such path"),
    ("/explore", None, None, 404, "/explore: there is no such path"),  # off unless a setting switches it on
    # To repeat the request would not help, which 429 would say.
    (INFER, REQUEST, {"Authorization": "x" * 7600}, 431, "the headers that are passed on take 77"),
    (INFER, REQUEST, {"Authorization": "Bearer \xe4"}, 400, NOT_ASCII),
    (INFER, REQUEST, {"Authorization": "Bearer a\tb"}, 400, NOT_ASCII),
    (CONTEXTS, context(key(3, 4), ttl_seconds=2**32), None, 400, "parameters[ttl_seconds]: must be less"),
    (CONTEXTS, context(key(3, 4), ttl=1), None, 400, "parameters[ttl]: is unknown"),
    (CONTEXTS, context(key(3, 4, name="query")), None, 400, "query: is unknown or given twice"),
    (CONTEXTS, context(key(3, 4), key(3, 4)), None, 400, "key: is unknown or given twice"),
    (CONTEXTS, context(key(2, 3, 2)), None, 400, "key: is FP32 of the shape [2, 3, 2]; must be"),
    (CONTEXTS, context(key(12)), None, 400, "key: is FP32 of the shape [12]; must be"),
    (CONTEXTS, context(key(3, 4, datatype="FP64")), None, 400, "key: is FP64 of the shape [3, 4]; must be"),
    (CONTEXTS, context(BATCH), None, 400, "mask: is BOOL of the shape [1, 3]; must be BOOL (rows)"),
    (CONTEXTS, context(key(2, 4), MASK), None, 400, "inputs: have different numbers of rows"),
    (CONTEXTS, context(SHARED), None, 400, "inputs: must not be in shared memory"),
]


@pytest.mark.parametrize(("path", "body", "headers", "status", "error"), ROWS, ids=[row[-1] for row in ROWS])
def test_a_request_is_refused(
    scripted: Scripted, port: int, path: str, body: Any, headers: Any, status: int, error: str
) -> None:
    answer = ask(port, path, body, headers)
    assert answer.status == status
    assert answer.error.startswith(error)
    assert ("accept-encoding" in answer.headers) is (status == 415)
    assert ("allow" in answer.headers) is (status == 405)
    assert scripted.calls.empty()
