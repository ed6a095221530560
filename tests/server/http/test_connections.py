"""Hostile and unlucky connections: sizes, slowness, floods, clients that leave."""

import json
import re
import signal
import socket
import time
from contextlib import ExitStack, suppress

import pytest

from attention_serving.protos.inference import open_inference_pb2 as pb
from tests.server.http.clients import Answer, answer_on, ask, connected, head, tensor
from tests.server.http.scripted import Blocked, Front, Scripted, front
from tests.server.http.test_inference import QUERY

PATH = "/v2/models/m/infer"
REQUEST = {"inputs": [tensor("query", QUERY)]}

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def port(scripted_front: Front) -> int:
    return scripted_front.port


def sent(port: int, *parts: bytes) -> Answer:
    """The answer to bytes on a connection of their own, which stays open."""
    with connected(port) as connection:
        for part in parts:
            connection.sendall(part)
        return answer_on(connection)


BAD_HEADS = {
    "negative": ["Content-Length: -1"],
    "two lengths": ["Content-Length: 1", "Content-Length: 2"],
    "huge": ["Content-Length: 99999999999999999999999999"],
    "two encodings": ["Content-Length: 3", "Transfer-Encoding: chunked", "Transfer-Encoding: identity"],
    "name": ["Bad Name: 1"],
    "zero": ["X: a\x00b"],
    "length and chunks": ["Content-Length: 3", "Transfer-Encoding: chunked"],
    "the same length twice": ["Content-Length: 3", "Content-Length: 3"],
    "folded length": ["Content-Length: 3", " 4"],
    "space after name": ["Content-Length : 3"],
    "compressed chunks": ["Transfer-Encoding: gzip, chunked"],
    "two lines of encodings": ["Transfer-Encoding: gzip", "Transfer-Encoding: chunked"],
    "unknown encoding": ["Transfer-Encoding: xchunked"],
    "two hosts": ["Host: other"],
    "line feed": ["X: a\nY: b"],
}


@pytest.mark.parametrize("lines", BAD_HEADS.values(), ids=BAD_HEADS)
def test_bad_heads(port: int, lines: list[str]) -> None:
    """What a proxy may understand in another way than this server is refused, and ends the connection."""
    with connected(port) as connection:
        connection.sendall(head(PATH, *lines))
        answer = answer_on(connection)
        assert answer.status in (400, 413, 501)
        assert answer.error.startswith("the request is not valid: ")
        assert _is_closed(connection)


BAD_LINES = {
    "what is not HTTP": b"\x16\x03\x01 hello\r\n\r\n",
    "no host": b"GET /v2/health/live HTTP/1.1\r\n\r\n",
    "version 2": b"GET /v2/health/live HTTP/2.0\r\nHost: a\r\n\r\n",
    "version 0.9": b"GET /v2/health/live\r\n\r\n",
    "connect": b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
    "preface of version 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "chunks in version 1.0": b"POST /v2 HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("start", BAD_LINES.values(), ids=BAD_LINES)
def test_bad_request_lines(port: int, start: bytes) -> None:
    answer = sent(port, start)
    assert answer.status in (400, 501)
    assert answer.error.startswith("the request is not valid: ")
    assert answer.headers["connection"] == "close"


def test_a_bad_request_behind_a_good_one_does_not_take_its_answer(port: int, scripted: Scripted) -> None:
    blocked = scripted.behaviours["ModelInfer"] = Blocked()
    with connected(port) as connection:
        _post(connection)
        scripted.next()
        connection.sendall(b"nonsense\r\n\r\n")
        blocked.release()
        assert answer_on(connection).status == 200
        assert _is_closed(connection)


def test_more_requests_on_a_connection_than_it_may_have(port: int, scripted: Scripted) -> None:
    blocked = scripted.behaviours["ModelInfer"] = Blocked()
    with connected(port) as connection:
        _post(connection)
        scripted.next()
        connection.sendall(20 * head("/v2/health/live", method="GET"))
        blocked.release()
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))  # until it is closed
        assert received.count(b"HTTP/1.1 200 ") == received.count(b"HTTP/1.1 ") == 17


def test_a_wish_for_another_protocol_is_ignored(port: int) -> None:
    """The parser would take the body for the other protocol, and the next bytes for a request."""
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    with connected(port) as connection:
        for body in (json.dumps(REQUEST).encode(), head("/v2/absent", method="GET")):
            connection.sendall(head(PATH, *upgrade, f"Content-Length: {len(body)}"))
            connection.sendall(body)
            assert answer_on(connection).status == (200 if body.startswith(b"{") else 400)


def test_trailers_are_no_headers(port: int, scripted: Scripted) -> None:
    body = json.dumps(REQUEST).encode()
    chunks = b"%x;name=value\r\n%s\r\n0\r\nauthorization: Bearer trailer\r\n\r\n" % (len(body), body)
    with connected(port) as connection:
        for _ in range(2):
            connection.sendall(head(PATH, "Transfer-Encoding: chunked") + chunks)
            assert answer_on(connection).status == 200
            assert "authorization" not in scripted.next().metadata


@pytest.mark.parametrize("end", [-2, None], ids=["unfinished", "whole"])
def test_a_head_that_is_too_large(port: int, end: int | None) -> None:
    large = head("/v2", *(f"H{index}: {'x' * 1000}" for index in range(70)), method="GET")
    answer = sent(port, large[:end])
    assert answer.status == 431
    assert answer.error == "the request is not valid: the head is larger than 65536 bytes"


@pytest.mark.parametrize("part", [b"1;" + b"x" * 200_000, b"0\r\nx: " + b"x" * 200_000])
def test_what_a_body_has_beside_its_data_is_limited(port: int, part: bytes) -> None:
    with connected(port) as connection, suppress(ConnectionError):
        connection.sendall(head(PATH, "Transfer-Encoding: chunked") + part)
        assert answer_on(connection).status == 431


@pytest.mark.parametrize("start", [b"", b"POST /v2/mo", head(PATH)[:-2]], ids=["nothing", "path", "headers"])
def test_a_head_that_does_not_arrive(port: int, start: bytes) -> None:
    answer = sent(port, start)
    assert answer.status == 408
    assert answer.error == "the head of the request did not arrive within 1 seconds"


def test_a_second_head_that_does_not_arrive(port: int) -> None:
    with connected(port) as connection:
        connection.sendall(head("/v2/health/live", method="GET"))
        assert answer_on(connection).status == 200
        connection.sendall(b"GET /v2")
        assert answer_on(connection).status == 408
        assert connection.recv(1) == b""


@pytest.mark.parametrize("start", [b"", b'{"inputs": '], ids=["nothing of it", "a part of it"])
def test_a_body_that_does_not_arrive(port: int, start: bytes) -> None:
    with connected(port) as connection:
        connection.sendall(head(PATH, "Content-Length: 100") + start)
        answer = answer_on(connection)
        assert answer.status == 408
        assert answer.error == "the body did not arrive within 1 seconds"
        assert answer.headers["connection"] == "close"
        assert connection.recv(1) == b""


def test_a_body_that_trickles(port: int) -> None:
    with connected(port) as connection:
        connection.sendall(head(PATH, "Transfer-Encoding: chunked"))
        started = time.monotonic()
        connection.settimeout(0.05)
        while time.monotonic() - started < 60:
            connection.sendall(b"1\r\n \r\n")
            try:
                found = connection.recv(4096)
            except TimeoutError:
                continue
            assert b" 408 " in found
            return
    pytest.fail("the body was read for ever")


@pytest.mark.usefixtures("server")
def test_bodies_that_do_not_arrive_take_no_places(front_port: int) -> None:
    """400 requests announce a body and send one byte of it: all of 10 others are served."""
    with ExitStack() as stack:
        for _ in range(400):
            slow = stack.enter_context(connected(front_port))
            slow.sendall(head(PATH, "Content-Length: 100") + b"{")
        statuses = [ask(front_port, PATH, REQUEST).status for _ in range(10)]
    assert statuses == 10 * [200]


def test_connections_that_wait_for_their_clients_make_room(server: Scripted) -> None:
    live = head("/v2/health/live", method="GET")
    begun = (b"", b"POST /v2/mo", head(PATH, "Content-Length: 100") + b"{", live)
    with front(f"127.0.0.1:{server.port}", "--max-connections=8") as running, ExitStack() as stack:
        for start in 3 * begun:
            slow = stack.enter_context(connected(running.port))
            slow.sendall(start)
            if start is live:
                assert answer_on(slow).status == 200
        assert [ask(running.port, PATH, REQUEST).status for _ in range(10)] == 10 * [200]


def test_more_requests_than_places(port: int, scripted: Scripted) -> None:
    blocked = scripted.behaviours["ModelInfer"] = Blocked()
    with ExitStack() as stack:
        busy = [stack.enter_context(connected(port)) for _ in range(2)]
        for connection in busy:
            _post(connection)
            scripted.next()
        answer = ask(port, PATH, REQUEST)
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.error == "2 requests are in progress, which is this server's limit; try again later"
        assert ask(port, "/v2/health/live").status == 200  # takes no place
        blocked.release()
        assert [answer_on(connection).status for connection in busy] == [200, 200]
    assert ask(port, PATH, REQUEST).status == 200


def test_a_client_that_leaves_cancels_its_call(port: int, scripted: Scripted) -> None:
    blocked = scripted.behaviours["ModelInfer"] = Blocked()
    for _ in range(2):  # both places
        with connected(port) as connection:
            _post(connection)
            scripted.next()
    assert blocked.cancelled.wait(60)
    blocked.release()
    _until_served(port)


def test_a_client_that_leaves_after_a_large_body_cancels_its_call(scripted: Scripted) -> None:
    blocked = scripted.behaviours["ModelInfer"] = Blocked()
    body = json.dumps(REQUEST).encode() + b" " * 100_000
    with front(f"127.0.0.1:{scripted.port}") as running, connected(running.port) as connection:
        connection.sendall(head(PATH, f"Content-Length: {len(body)}"))
        assert ask(running.port, "/v2/health/live").status == 200  # the head was read by now
        running.process.send_signal(signal.SIGSTOP)
        connection.sendall(body)
        running.process.send_signal(signal.SIGCONT)  # it reads the body at once
        assert [scripted.next().method for _ in range(2)] == ["ServerLive", "ModelInfer"]
        connection.close()
        assert blocked.cancelled.wait(30)  # and not only when the process gives the connection up
        blocked.release()


def test_a_client_that_leaves_while_it_sends(port: int) -> None:
    for _ in range(4):
        with connected(port) as connection:
            connection.sendall(head(PATH, "Content-Length: 100") + b"{")
    _until_served(port)


def test_more_connections_than_there_may_be(scripted: Scripted) -> None:
    """Requests in progress make no room."""
    blocked = scripted.behaviours["ModelInfer"] = Blocked()
    with front(f"127.0.0.1:{scripted.port}", "--max-connections=8") as running, ExitStack() as stack:
        busy = [stack.enter_context(connected(running.port)) for _ in range(8)]
        for connection in busy:
            _post(connection)
            scripted.next()
        with connected(running.port) as another:
            assert _is_closed(another)
        blocked.release()
        assert [answer_on(connection).status for connection in busy] == 8 * [200]


def test_a_client_that_does_not_read_is_cut_off(scripted: Scripted, scripted_front: Front) -> None:
    data = bytes(32 << 20)
    output = pb.ModelInferResponse.InferOutputTensor(name="a", datatype="UINT8", shape=[len(data)])
    reply = pb.ModelInferResponse(outputs=[output], raw_output_contents=[data])
    scripted.behaviours["ModelInfer"] = lambda _request, _context: reply
    document = {**REQUEST, "parameters": {"binary_data_output": True}}
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", scripted_front.port))
        _post(connection, document)
        assert scripted.next().method == "ModelInfer"
        # Both places can be taken again only once the one that is not read has been given up.
        blocked = scripted.behaviours["ModelInfer"] = Blocked()
        with ExitStack() as stack:
            until = time.monotonic() + 60
            while time.monotonic() < until:
                others = [stack.enter_context(connected(scripted_front.port)) for _ in range(2)]
                for other in others:
                    _post(other)
                others[-1].settimeout(0.5)
                try:
                    assert answer_on(others[-1]).status == 503
                except TimeoutError:
                    break
                stack.close()
            else:
                pytest.fail("the connection was not given up")
        blocked.release()


def test_several_requests_on_one_connection_and_in_one_packet(port: int) -> None:
    live = head("/v2/health/live", method="GET")
    with connected(port) as connection:
        connection.sendall(3 * live)
        connection.settimeout(60)
        found = b""
        while found.count(b"HTTP/1.1 200 ") < 3:
            found += connection.recv(4096)


@pytest.mark.parametrize("size", [8_000, 16_500, 60_000])
def test_a_token_that_is_too_large(port: int, size: int) -> None:
    """To repeat the request would not help, which 429 would say."""
    answer = ask(port, PATH, REQUEST, {"Authorization": f"Bearer {'x' * size}"})
    assert answer.status == 431
    assert re.fullmatch(r"the headers that are passed on take \d+ bytes; the limit is 7680", answer.error)
    assert "retry-after" not in answer.headers


@pytest.mark.parametrize("value", ["Bearer \xe4", "a\tb"], ids=["latin", "tab"])
def test_a_token_that_metadata_cannot_carry(port: int, value: str) -> None:
    answer = ask(port, PATH, REQUEST, {"Authorization": value})
    assert answer.status == 400
    assert answer.error == "authorization: contains characters other than printable ASCII"


def _post(connection: socket.socket, document: object = REQUEST) -> None:
    body = json.dumps(document).encode()
    connection.sendall(head(PATH, f"Content-Length: {len(body)}") + body)


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def _until_served(port: int) -> None:
    """A place or a connection becomes free when the process sees that a client has left."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if ask(port, PATH, REQUEST).status == 200:
                return
        except ConnectionError:
            pass
    pytest.fail("no place became free")
