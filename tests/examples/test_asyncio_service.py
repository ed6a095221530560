"""The asyncio service: answers, refusals, overload, a frozen server, and its end."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from attention_client import AttentionClient
from numpy.testing import assert_allclose
from starlette.testclient import TestClient

from examples.asyncio_service import make_app
from scripts.local_server import ROOT, ServerProcess
from tests.encoders.repository import SENTENCE
from tests.encoders.texts import ATOL, RTOL, TEXTS
from tests.server.http.clients import head

pytestmark = pytest.mark.thorough
# A port on which nothing listens.
NOWHERE = "127.0.0.1:9"
BODY = b'{"texts": ["dessert"]}'
PATIENCE_SECONDS = 60
LONG = "dessert " * 200


@pytest.fixture(scope="module")
def web(example_server: ServerProcess) -> Iterator[TestClient]:
    with TestClient(make_app(example_server.target, SENTENCE, timeout=PATIENCE_SECONDS)) as web:
        yield web


def test_embeddings_are_those_of_the_server(web: TestClient, example_server: ServerProcess) -> None:
    answer = web.post("/embed", json={"texts": TEXTS})
    assert answer.status_code == 200
    with AttentionClient(example_server.target) as client:
        expected = client.embed(SENTENCE, list(TEXTS))
    assert_allclose(answer.json()["embeddings"], expected, rtol=RTOL, atol=ATOL)
    assert web.get("/ready").json() == {"ready": True}


@pytest.mark.parametrize(
    "body",
    ["{", "[]", "{}", '{"texts": "a"}', '{"texts": [1, 2]}', '{"texts": []}', f'{{"texts": ["{LONG}"]}}'],
)
def test_what_the_service_or_the_model_refuses_is_the_callers_mistake(web: TestClient, body: str) -> None:
    answer = web.post("/embed", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]


def test_an_absent_server_is_503() -> None:
    with TestClient(make_app(NOWHERE, SENTENCE, timeout=PATIENCE_SECONDS)) as web:
        for answer in (web.post("/embed", content=BODY), web.get("/ready")):
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"


def test_a_signal_ends_the_service_after_the_request_in_progress(example_server: ServerProcess) -> None:
    command = [sys.executable, "-m", "examples.asyncio_service", "--port=0", f"--model={SENTENCE}"]
    command.append(f"--server={example_server.target}")
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as service:
        assert service.stderr
        lines = iter(service.stderr.readline, "")
        ports = (re.search(r"running on http://.*:(\d+)", line) for line in lines)
        port = next(int(found[1]) for found in ports if found)
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as connection:
            connection.sendall(head("/embed", f"Content-Length: {len(BODY)}", "Expect: 100-continue"))
            assert connection.recv(100).startswith(b"HTTP/1.1 100 ")  # the request has begun
            service.send_signal(signal.SIGTERM)
            assert any("Shutting down" in line for line in lines)
            connection.sendall(BODY)
            assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
        assert service.wait(PATIENCE_SECONDS) == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
