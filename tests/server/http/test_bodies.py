"""Bodies that are too large, or compressed."""

import gzip
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.http.clients import answer_on, ask, connected, head, tensor
from tests.server.http.scripted import Front, Scripted, front
from tests.server.http.test_inference import QUERY

PATH = "/v2/models/m/infer"
LIMIT = 65536
REQUEST = {"inputs": [tensor("query", QUERY)]}

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def port(scripted_front: Front) -> int:
    return scripted_front.port


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_a_body_that_is_too_large(port: int, chunked: bool) -> None:
    body: Any = bytes(LIMIT + 1)
    if chunked:
        body = iter([bytes(LIMIT), b"1"])
    answer = ask(port, PATH, body)
    assert answer.status == 413
    assert answer.error == f"the body is larger than the limit of {LIMIT} bytes"


def test_a_body_of_the_largest_size_is_read(port: int) -> None:
    answer = ask(port, PATH, b" " * LIMIT)
    assert answer.status == 400
    assert answer.error.startswith("body: is not JSON")


def test_an_endless_body_is_not_read_for_ever(port: int) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield bytes(LIMIT)

    try:
        answer = ask(port, PATH, endless())
    except ConnectionError:
        return  # the answer was lost with the connection, which is what this client deserves
    assert answer.status == 413


def test_a_client_that_waits_to_be_asked_for_its_body(port: int) -> None:
    expect = "Expect: 100-continue"
    with connected(port) as connection:
        connection.sendall(head(PATH, expect, f"Content-Length: {LIMIT + 1}"))
        answer = answer_on(connection)
    assert answer.status == 413
    with connected(port) as connection:
        connection.sendall(head(PATH, expect, "Content-Length: 2"))
        assert connection.recv(4096).startswith(b"HTTP/1.1 100 ")
        connection.sendall(b"{}")
        assert answer_on(connection).status == 400


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_body_that_is_too_large_decompressed(port: int, encoding: str, compress: Any) -> None:
    body = compress(bytes(100 * LIMIT))
    assert len(body) < LIMIT
    answer = ask(port, PATH, body, {"Content-Encoding": encoding})
    assert answer.status == 413


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"{}", "the body is damaged"),
        (gzip.compress(b"{}")[:-4], "the compressed body ends too early"),
        (gzip.compress(b"{}") + b"{}", "data follow the compressed body"),
        (gzip.compress(b"{}") * 2, "data follow the compressed body"),
    ],
    ids=["plain", "cut", "more", "two"],
)
def test_damaged_compression(port: int, body: bytes, error: str) -> None:
    answer = ask(port, PATH, body, {"Content-Encoding": "gzip"})
    assert answer.status == 400
    assert answer.error.startswith(f"Content-Encoding: {error}")


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "x" * 500])
def test_unknown_compression(port: int, encoding: str) -> None:
    answer = ask(port, PATH, b"{}", {"Content-Encoding": encoding})
    assert answer.status == 415
    assert answer.error.startswith(f"Content-Encoding: is '{encoding[:100]}'")
    assert answer.headers["accept-encoding"] == "gzip, deflate, identity"


def test_a_tensor_that_is_larger_as_a_message(port: int) -> None:
    body = b'{"inputs":[{"name":"a","shape":[30000],"datatype":"INT64","data":[0%s]}]}' % (b",0" * 29999)
    assert len(body) < LIMIT
    answer = ask(port, PATH, body)
    assert answer.status == 413
    assert "bytes as a message; the limit is 65536" in answer.error


def test_json_that_would_need_too_much_memory(scripted: Scripted) -> None:
    with front(f"127.0.0.1:{scripted.port}", "--max-in-flight-bytes=1MiB") as process:
        answer = ask(process.port, PATH, b"[" + b"[]," * 20_000 + b"[]]")
    assert answer.status == 413
    assert answer.error.startswith("the JSON could take ")
