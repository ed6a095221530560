"""The port for metrics: one path, a bounded number of connections, and a bounded time for each."""

import gzip
import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry, Gauge

from attention_serving.server.observe.prometheus import MAX_CONNECTIONS, MetricsEndpoint

HOST = "127.0.0.1"
TEXT = b"# HELP answer The answer.\n# TYPE answer gauge\nanswer 42.0\n"
PATIENCE_SECONDS = 60.0


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("answer", "The answer.", registry=registry).set(42)
    return registry


@pytest.fixture
def endpoint(registry: CollectorRegistry) -> Iterator[MetricsEndpoint]:
    endpoint = MetricsEndpoint(registry, HOST, 0)
    yield endpoint
    endpoint.close()


def request(
    endpoint: MetricsEndpoint, method: str, path: str, host: str = HOST, **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(host, endpoint.port, timeout=PATIENCE_SECONDS)
    connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


def test_the_metrics_are_served_at_their_path(endpoint: MetricsEndpoint) -> None:
    response, body = request(endpoint, "GET", "/metrics")
    assert (response.status, body) == (200, TEXT)
    assert response.headers["Content-Type"].startswith("text/plain; version=")


@pytest.mark.parametrize(
    "path", ["/", "/v2/health/ready", "/v1/models/m", "/metrics/", "/metrics2", "/favicon.ico"]
)
def test_no_other_path_is_found(endpoint: MetricsEndpoint, path: str) -> None:
    response, body = request(endpoint, "GET", path)
    assert (response.status, body) == (404, b"only /metrics is served on this port\n")
    assert response.headers["Content-Type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize("method", ["HEAD", "POST", "DELETE", "BREW"])
def test_no_other_method_is_allowed(endpoint: MetricsEndpoint, method: str) -> None:
    response, _ = request(endpoint, method, "/metrics")
    assert response.status == 405
    assert response.headers["Allow"] == "OPTIONS,GET"


def test_a_client_may_ask_for_gzip(endpoint: MetricsEndpoint) -> None:
    response, body = request(endpoint, "GET", "/metrics", Accept_Encoding="gzip")
    assert response.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(body) == TEXT


def test_a_client_may_ask_for_openmetrics(endpoint: MetricsEndpoint) -> None:
    accept = "application/openmetrics-text; version=1.0.0"
    response, body = request(endpoint, "GET", "/metrics", Accept=accept)
    assert response.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n")


def test_a_client_may_name_metrics(registry: CollectorRegistry, endpoint: MetricsEndpoint) -> None:
    Gauge("other", "Another.", registry=registry).set(1)
    assert request(endpoint, "GET", "/metrics?name[]=answer")[1] == TEXT


@pytest.mark.parametrize("host", ["::1", "[::1]", "localhost"])
def test_other_addresses_and_names_can_be_listened_on(registry: CollectorRegistry, host: str) -> None:
    endpoint = MetricsEndpoint(registry, host, 0)
    assert request(endpoint, "GET", "/metrics", host=host.strip("[]"))[1] == TEXT
    endpoint.close()


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


def test_connections_beyond_the_limit_are_refused_and_hold_no_thread(endpoint: MetricsEndpoint) -> None:
    before = handlers()
    with ExitStack() as stack:
        connections(endpoint, MAX_CONNECTIONS, stack)
        (further,) = connections(endpoint, 1, stack)
        assert further.recv(100).startswith(b"HTTP/1.0 503 ")
        assert handlers() - before == MAX_CONNECTIONS


def test_half_sent_requests_end_after_a_time(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MetricsEndpoint, "max_connection_seconds", 0.2)
    endpoint = MetricsEndpoint(registry, HOST, 0)
    with ExitStack() as stack:
        for connection in connections(endpoint, MAX_CONNECTIONS, stack):
            assert connection.recv(100) == b""
    assert request(endpoint, "GET", "/metrics")[1] == TEXT
    endpoint.close()


def test_closing_does_not_wait_for_clients(registry: CollectorRegistry) -> None:
    endpoint = MetricsEndpoint(registry, HOST, 0)
    with ExitStack() as stack:
        connections(endpoint, 3, stack)
        endpoint.close()
