"""Hostile and unlucky connections: heads, sizes, slowness, floods, clients that leave; and drains."""

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.http.connection import LARGE_BYTES
from tests.server.http.clients import HOST, INFER, PLACES, REQUEST, answer_on, ask, connected, head, post
from tests.server.http.scripted import Blocked, Scripted, front
from tests.server.seams import PATIENCE_SECONDS, wait_until

LIVE = head("/v2/health/live", method="GET")


@pytest.fixture
def blocked(scripted: Scripted) -> Iterator[Blocked]:
    """Holds all inference until it is released."""
    behaviour = scripted.behaviours["ModelInfer"] = Blocked()
    yield behaviour
    behaviour.release()


@contextmanager
def busy(port: int, scripted: Scripted, number: int) -> Iterator[list[socket.socket]]:
    """Connections with a request of inference that has reached the gRPC server."""
    with ExitStack() as stack:
        connections = [stack.enter_context(connected(port)) for _ in range(number)]
        for connection in connections:
            post(connection)
            scripted.next("ModelInfer")
        yield connections


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


HOST_LINE, LENGTH, CHUNKED = b"Host: a\r\n", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n"
BAD = {
    "two lengths": b"POST /v2 HTTP/1.1\r\n" + HOST_LINE + LENGTH + LENGTH,
    "length and chunks": b"POST /v2 HTTP/1.1\r\n" + HOST_LINE + LENGTH + CHUNKED,
    "folded length": b"POST /v2 HTTP/1.1\r\n" + HOST_LINE + LENGTH + b" 4\r\n",
    "space after name": b"POST /v2 HTTP/1.1\r\n" + HOST_LINE + b"Content-Length : 3\r\n",
    "compressed chunks": b"POST /v2 HTTP/1.1\r\n" + HOST_LINE + b"Transfer-Encoding: gzip, chunked\r\n",
    "two encodings": b"POST /v2 HTTP/1.1\r\n" + HOST_LINE + b"Transfer-Encoding: gzip\r\n" + CHUNKED,
    "unknown encoding": b"POST /v2 HTTP/1.1\r\n" + HOST_LINE + b"Transfer-Encoding: xchunked\r\n",
    "chunks in version 1.0": b"POST /v2 HTTP/1.0\r\n" + HOST_LINE + CHUNKED,
    "line feed": b"POST /v2 HTTP/1.1\r\n" + HOST_LINE + b"X: a\nY: b\r\n",
    "two hosts": b"POST /v2 HTTP/1.1\r\n" + HOST_LINE + HOST_LINE,
    "no host": b"GET /v2/health/live HTTP/1.1\r\n",
    "version 2": b"GET /v2/health/live HTTP/2.0\r\n" + HOST_LINE,
    "version 0.9": b"GET /v2/health/live\r\n",
    "connect": b"CONNECT a:1 HTTP/1.1\r\n" + HOST_LINE,
    "what is not HTTP": b"\x16\x03\x01 hello\r\n",
}


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("start", BAD.values(), ids=BAD)
def test_bad_heads(port: int, start: bytes) -> None:
    """What a proxy may understand in another way than this server is refused, and ends the connection."""
    with connected(port) as connection:
        connection.sendall(start + b"\r\n")
        answer = answer_on(connection)
        assert answer.status in (400, 501)
        assert answer.error.startswith("the request is not valid: ")
        assert answer.headers["connection"] == "close"
        assert is_closed(connection)


@pytest.mark.parametrize(("behind", "answered"), [(b"nonsense\r\n\r\n", 1), (20 * LIVE, 17)])
def test_requests_that_are_refused_behind_one_in_progress_do_not_take_its_answer(
    port: int, scripted: Scripted, blocked: Blocked, behind: bytes, answered: int
) -> None:
    """One that is not valid, and more than a connection may have."""
    with busy(port, scripted, 1) as (connection,):
        connection.sendall(behind)
        blocked.release()
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))  # until it is closed
        assert received.count(b"HTTP/1.1 200 ") == received.count(b"HTTP/1.1 ") == answered


@pytest.mark.usefixtures("scripted")
def test_a_wish_for_another_protocol_is_ignored(port: int) -> None:
    """The parser would take the body for the other protocol, and the next bytes for a request."""
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    with connected(port) as connection:
        for body in (json.dumps(REQUEST).encode(), head("/v2/absent", method="GET")):
            connection.sendall(head(INFER, *upgrade, f"Content-Length: {len(body)}"))
            connection.sendall(body)
            assert answer_on(connection).status == (200 if body.startswith(b"{") else 400)


def test_trailers_are_no_headers(port: int, scripted: Scripted) -> None:
    body = json.dumps(REQUEST).encode()
    chunks = b"%x;name=value\r\n%s\r\n0\r\nauthorization: Bearer trailer\r\n\r\n" % (len(body), body)
    with connected(port) as connection:
        for _ in range(2):
            connection.sendall(head(INFER, "Transfer-Encoding: chunked") + chunks)
            assert answer_on(connection).status == 200
            assert "authorization" not in scripted.next().metadata


LONG_HEAD = head("/v2", *(f"H{index}: {'x' * 1000}" for index in range(70)), method="GET")
CHUNKED_HEAD = head(INFER, "Transfer-Encoding: chunked")
TOO_LONG = {
    "unfinished head": (LONG_HEAD[:-2], 431, "head is larger than 65536 bytes"),
    "head": (LONG_HEAD, 431, "head is larger than 65536 bytes"),
    "extension": (CHUNKED_HEAD + b"1;" + b"x" * 200_000, 431, "larger than 65536 bytes"),
    "trailer": (CHUNKED_HEAD + b"0\r\nx: " + b"x" * 200_000, 431, "larger than 65536 bytes"),
    "headers": (head("/v2", *300 * ("a: b",), method="GET"), 431, "it has more than 256 headers"),
    "chunks": (CHUNKED_HEAD + 65_537 * b"1\r\n \r\n", 413, "the body has more than 65536 chunks"),
}


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(("start", "status", "error"), TOO_LONG.values(), ids=TOO_LONG)
def test_what_a_request_has_beside_its_data_is_limited(
    port: int, start: bytes, status: int, error: str
) -> None:
    with connected(port) as connection:
        connection.sendall(start)
        answer = answer_on(connection)
        assert answer.status == status
        assert answer.error.endswith(error)


def test_the_time_of_a_head(shared_scripted: Scripted) -> None:
    """That of the first begins with the connection, that of a later one with its first byte."""
    with (
        front(shared_scripted, message_timeout_seconds=0.5) as running,
        connected(running.port) as first,
        connected(running.port) as later,
    ):
        later.sendall(LIVE)
        assert answer_on(later).status == 200
        first.sendall(head(INFER)[:-2])
        answer = answer_on(first)
        assert answer.status == 408
        assert answer.error == "the head of the request did not arrive within 0.5 seconds"
        assert first.recv(1) == b""
        later.settimeout(0.6)
        with pytest.raises(TimeoutError):  # it is idle, which it may be for longer
            later.recv(1)
        later.settimeout(PATIENCE_SECONDS)
        later.sendall(b"GET /v2")
        assert answer_on(later).status == 408


def test_a_connection_without_a_request_is_closed_without_a_reply(shared_scripted: Scripted) -> None:
    with front(shared_scripted, message_timeout_seconds=0.2) as running, connected(running.port) as silent:
        assert silent.recv(1) == b""


def test_a_body_that_the_server_does_not_read_yet_may_take_longer(
    scripted: Scripted, blocked: Blocked
) -> None:
    body = json.dumps(REQUEST).encode()
    with (
        front(scripted, message_timeout_seconds=0.3) as running,
        busy(running.port, scripted, 1) as (connection,),
    ):
        connection.sendall(head(INFER, f"Content-Length: {len(body)}") + body[:-1])
        connection.settimeout(0.6)
        with pytest.raises(TimeoutError):  # neither is answered
            connection.recv(1)
        connection.settimeout(PATIENCE_SECONDS)
        blocked.release()
        assert answer_on(connection).status == 200
        connection.sendall(body[-1:])
        assert answer_on(connection).status == 200


@pytest.mark.usefixtures("scripted")
def test_version_1_0_has_no_status_100(port: int) -> None:
    start = f"POST {INFER} HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{{}}"
    with connected(port) as connection:
        connection.sendall(start.encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400 ")


def test_slow_connections_make_room_and_take_no_places(shared_scripted: Scripted) -> None:
    begun = (b"", b"POST /v2/mo", head(INFER, "Content-Length: 100") + b"{", LIVE)
    with (
        front(shared_scripted, max_connections=8, max_concurrent_calls=1) as running,
        ExitStack() as stack,
    ):
        for start in 3 * begun:
            slow = stack.enter_context(connected(running.port))
            slow.sendall(start)
            if start is LIVE:
                assert answer_on(slow).status == 200
        assert [ask(running.port, INFER, REQUEST).status for _ in range(10)] == 10 * [200]


def test_requests_in_progress_make_no_room(scripted: Scripted, blocked: Blocked) -> None:
    with front(scripted, max_connections=4) as running, busy(running.port, scripted, 4) as connections:
        with connected(running.port) as another:
            assert is_closed(another)
        blocked.release()
        assert [answer_on(connection).status for connection in connections] == 4 * [200]


def test_more_requests_than_places(port: int, scripted: Scripted, blocked: Blocked) -> None:
    with busy(port, scripted, PLACES) as connections:
        answer = ask(port, INFER, REQUEST)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.error == "2 requests are in progress, which is this server's limit; try again later"
        assert ask(port, "/v2/health/live").status == 200  # takes no place
        blocked.release()
        assert [answer_on(connection).status for connection in connections] == PLACES * [200]
    assert ask(port, INFER, REQUEST).status == 200


@pytest.mark.parametrize("padding", [0, 2 * LARGE_BYTES], ids=["small", "large"])
def test_leaving_cancels_a_call(port: int, scripted: Scripted, blocked: Blocked, padding: int) -> None:
    """Also after a large body, for which reading was paused."""
    with connected(port) as connection:
        body = json.dumps(REQUEST).encode() + b" " * padding
        connection.sendall(head(INFER, f"Content-Length: {len(body)}") + body)
        scripted.next()
    assert blocked.cancelled.wait(PATIENCE_SECONDS)  # and not only when the server gives the connection up
    blocked.release()
    wait_until(lambda: ask(port, INFER, REQUEST).status == 200)  # the place is free


def test_requests_that_are_not_answered_free_their_memory(scripted: Scripted, blocked: Blocked) -> None:
    """One that waits behind another when the connection is reset."""
    with front(scripted, max_in_flight_bytes=20_000) as running:
        with busy(running.port, scripted, 1) as (connection,):
            connection.sendall(head(INFER, "Content-Length: 12000") + b" " * 12_000)
            wait_until(lambda: ask(running.port, INFER, b" " * 2000).status == 503)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        blocked.release()
        wait_until(lambda: ask(running.port, INFER, b" " * 2000).status == 400)


def test_a_client_that_does_not_read_is_cut_off(scripted: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    data = bytes(32 << 20)  # larger than all buffers
    output = pb.ModelInferResponse.InferOutputTensor(name="a", datatype="UINT8", shape=[len(data)])
    scripted.answer("ModelInfer", pb.ModelInferResponse(outputs=[output], raw_output_contents=[data]))
    with (
        front(scripted, max_concurrent_calls=1, message_timeout_seconds=0.2) as running,
        socket.socket() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((HOST, running.port))
        post(connection, {**REQUEST, "parameters": {"binary_data_output": True}})
        scripted.next()
        scripted.behaviours.clear()
        wait_until(lambda: ask(running.port, INFER, REQUEST).status == 200)  # the only place is free again
    assert "Traceback" not in caplog.text


def test_a_drain_answers_what_is_in_progress(scripted: Scripted, blocked: Blocked) -> None:
    with (
        front(scripted) as running,
        busy(running.port, scripted, 1) as (waiting,),
        connected(running.port) as slow,
        connected(running.port) as idle,
    ):
        idle.sendall(LIVE)
        assert answer_on(idle).status == 200
        slow.sendall(head("/v2/repository/index", "Content-Length: 2") + b"{")
        assert ask(running.port, "/v2/health/live").status == 200  # so that the head before has been read
        running.server.stop()
        assert is_closed(idle)
        with pytest.raises(ConnectionError):
            ask(running.port, "/v2")
        slow.sendall(b"}")
        assert answer_on(slow).status == 200
        blocked.release()
        assert answer_on(waiting).status == 200
        assert is_closed(waiting)


def test_the_grace_ends(scripted: Scripted, blocked: Blocked) -> None:
    with front(scripted, grace_seconds=0) as running, busy(running.port, scripted, 1) as (connection,):
        running.server.stop()
        answer = answer_on(connection)
        assert (answer.status, answer.error) == (503, "the server is shutting down; retry on another server")
    assert blocked.cancelled.wait(PATIENCE_SECONDS)


def test_a_grpc_server_that_is_not_there() -> None:
    gone = Scripted()
    with front(gone) as running:
        assert ask(running.port, "/v2").status == 200
        gone.close()
        assert ask(running.port, INFER, REQUEST).status == 503
