"""Bodies that are too large, or compressed."""

import gzip
import http.client
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from attention_serving.server.http.server import MAX_CHUNKS
from tests.chaos.process import readings, reset_peak
from tests.server.http.clients import HOST, answer_on, ask, connected, head, tensor
from tests.server.http.scripted import Front, Scripted, front
from tests.server.http.test_inference import QUERY

PATH = "/v2/models/m/infer"
LIMIT = 1 << 20
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
    body = b'{"inputs":[{"name":"a","shape":[300000],"datatype":"INT64","data":[0%s]}]}' % (b",0" * 299999)
    assert len(body) < LIMIT
    answer = ask(port, PATH, body)
    assert answer.status == 413
    assert "bytes as a message; the limit is 1048576" in answer.error


def test_json_that_would_need_too_much_memory(scripted: Scripted) -> None:
    with front(f"127.0.0.1:{scripted.port}", "--max-in-flight-bytes=1MiB") as process:
        answer = ask(process.port, PATH, b"[" + b"[]," * 20_000 + b"[]]")
    assert answer.status == 413
    assert answer.error.startswith("the JSON could take ")


@contextmanager
def neighbour(port: int) -> Iterator[list[float]]:
    """Asks again and again on a connection of its own; yields the seconds of each answer."""
    seconds: list[float] = []
    ended = threading.Event()

    def work() -> None:
        connection = http.client.HTTPConnection(HOST, port, timeout=60)
        while not ended.is_set():
            began = time.monotonic()
            connection.request("GET", "/v2/health/live")
            assert connection.getresponse().read()
            seconds.append(time.monotonic() - began)
        connection.close()

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        try:
            yield seconds
        finally:
            ended.set()
            working.result()


@pytest.mark.usefixtures("server")
def test_a_body_of_many_chunks_does_not_delay_others(front_port: int) -> None:
    chunk = b"1\r\n \r\n"
    with neighbour(front_port) as seconds:
        with connected(front_port) as connection:
            connection.sendall(head(PATH, "Transfer-Encoding: chunked"))
            with suppress(ConnectionError):  # the server need not read all of it
                connection.sendall(600_000 * chunk)
                connection.recv(1)
        with connected(front_port) as connection:
            connection.sendall(head(PATH, "Transfer-Encoding: chunked") + MAX_CHUNKS * chunk + b"1\r\n")
            answer = answer_on(connection)
    assert max(seconds) < 0.5
    assert answer.status == 413
    assert answer.error == f"the request is not valid: the body has more than {MAX_CHUNKS} chunks"


def test_compressed_bodies_neither_take_more_memory_than_is_reserved_nor_delay_others(
    scripted: Scripted,
) -> None:
    mebibyte = 1 << 20
    body = gzip.compress(bytes(128 * mebibyte))
    options = ("--max-message-bytes=128MiB", "--max-in-flight-bytes=128MiB")
    with front(f"{HOST}:{scripted.port}", *options) as running:
        ask(running.port, PATH, REQUEST)
        idle = reset_peak(running.process.pid)
        with neighbour(running.port) as seconds, ThreadPoolExecutor(4) as pool:
            asked = [
                pool.submit(ask, running.port, PATH, body, {"Content-Encoding": "gzip"}) for _ in range(4)
            ]
            statuses = [each.result().status for each in asked]
        peak = readings(running.process.pid).peak - idle
    assert set(statuses) <= {413, 503}
    assert peak < (128 + 64) * mebibyte
    assert max(seconds) < 0.5
