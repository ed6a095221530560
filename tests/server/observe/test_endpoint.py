"""The port for metrics: one path, a bounded number of connections, and a bounded time for each."""

import gzip
import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry, Gauge

from attention_serving.server.errors import BindError
from attention_serving.server.observe.prometheus import MAX_CONNECTIONS, MetricsEndpoint

HOST = "127.0.0.1"
TEXT = b"# HELP answer The answer.\n# TYPE answer gauge\nanswer 42.0\n"
PATIENCE_SECONDS = 60.0


@pytest.fixture
def listen() -> Iterator[Callable[[str], MetricsEndpoint]]:
    registry = CollectorRegistry()
    Gauge("answer", "The answer.", registry=registry).set(42)
    with ExitStack() as stack:

        def listen(host: str) -> MetricsEndpoint:
            endpoint = MetricsEndpoint(registry, host, 0)
            stack.callback(endpoint.close)
            return endpoint

        yield listen


@pytest.fixture
def endpoint(listen: Callable[[str], MetricsEndpoint]) -> MetricsEndpoint:
    return listen(HOST)


def request(
    endpoint: MetricsEndpoint, method: str = "GET", path: str = "/metrics", host: str = HOST, **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(host, endpoint.port, timeout=PATIENCE_SECONDS)
    connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("GET", "/metrics", 200, TEXT),
        ("GET", "/metrics/", 404, b"only /metrics is served on this port\n"),
        ("GET", "/v2/health/ready", 404, b"only /metrics is served on this port\n"),
        ("POST", "/metrics", 405, b"# HTTP 405"),
    ],
)
def test_one_path_is_served(
    endpoint: MetricsEndpoint, method: str, path: str, status: int, body: bytes
) -> None:
    response, found = request(endpoint, method, path)
    assert response.status == status
    assert found.startswith(body)
    assert response.headers.get("Content-Type", "text/plain").startswith("text/plain")


def test_a_client_may_ask_for_openmetrics_and_gzip(endpoint: MetricsEndpoint) -> None:
    accept = "application/openmetrics-text; version=1.0.0"
    response, body = request(endpoint, Accept=accept, Accept_Encoding="gzip")
    assert response.headers["Content-Type"].startswith(accept)
    assert gzip.decompress(body).endswith(b"# EOF\n")


@pytest.mark.parametrize("host", ["[::1]", "localhost"])
def test_other_addresses_and_names_can_be_listened_on(
    listen: Callable[[str], MetricsEndpoint], host: str
) -> None:
    assert request(listen(host), host=host.strip("[]"))[1] == TEXT


def test_a_port_in_use_is_an_error_and_a_closed_one_is_free(endpoint: MetricsEndpoint) -> None:
    with pytest.raises(BindError, match=rf"cannot listen on {HOST}:{endpoint.port} for metrics: .*in use"):
        MetricsEndpoint(CollectorRegistry(), HOST, endpoint.port)
    with ExitStack() as stack:
        connections(endpoint, 3, stack)
        endpoint.close()  # does not wait for clients
    with pytest.raises(ConnectionRefusedError):
        request(endpoint)


def connections(endpoint: MetricsEndpoint, count: int, stack: ExitStack) -> list[socket.socket]:
    """Connections that have sent the beginning of a request, and no more."""
    opened = [
        stack.enter_context(socket.create_connection((HOST, endpoint.port), timeout=PATIENCE_SECONDS))
        for _ in range(count)
    ]
    for connection in opened:
        connection.sendall(b"GET /metrics HTTP/1.0\r\nAccept: ")
    return opened


def handlers() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_connections_beyond_the_limit_are_refused_and_all_end_after_a_time(
    listen: Callable[[str], MetricsEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MetricsEndpoint, "max_connection_seconds", 2.0)
    endpoint, before = listen(HOST), handlers()
    with ExitStack() as stack:
        opened = connections(endpoint, MAX_CONNECTIONS, stack)
        (further,) = connections(endpoint, 1, stack)
        assert further.recv(100).startswith(b"HTTP/1.0 503 ")
        assert handlers() - before == MAX_CONNECTIONS
        for connection in opened:
            assert connection.recv(100) == b""
    assert request(endpoint)[1] == TEXT
