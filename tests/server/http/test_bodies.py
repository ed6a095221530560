"""Bodies: sizes, compression, slowness; and that a large one delays nobody else."""

import gzip
import json
import select
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from attention_serving.server.http.connection import LARGE_BYTES, MAX_CHUNKS, run
from tests.server.http.clients import INFER, MAX_BYTES, REQUEST, answer_on, ask, connected, head
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


@pytest.mark.usefixtures("scripted")
def test_a_body_of_too_many_chunks(port: int) -> None:
    chunk = b"1\r\n \r\n"
    with connected(port) as connection:
        connection.sendall(head(INFER, "Transfer-Encoding: chunked") + MAX_CHUNKS * chunk + b"1\r\n")
        answer = answer_on(connection)
    assert answer.status == 413
    assert answer.error == f"the request is not valid: the body has more than {MAX_CHUNKS} chunks"


async def test_work_on_large_bodies_leaves_the_event_loop() -> None:
    own = threading.get_ident()
    assert await run(LARGE_BYTES, threading.get_ident) == own
    assert await run(LARGE_BYTES + 1, threading.get_ident) != own


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
