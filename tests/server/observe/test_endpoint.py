"""The port for metrics: one path, and a bounded number of connections, none of which is silent for long."""

import re
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from prometheus_client import CollectorRegistry, Gauge

from attention_serving.server.errors import ServerError
from attention_serving.server.observe import prometheus
from attention_serving.server.observe.prometheus import MAX_CONNECTIONS, MetricsEndpoint
from tests.server.http.clients import HOST, ask
from tests.server.seams import wait_until

TEXT = b"# HELP answer The answer.\n# TYPE answer gauge\nanswer 42.0\n"


REGISTRY = CollectorRegistry()
Gauge("answer", "The answer.", registry=REGISTRY).set(42)


@contextmanager
def listening(host: str) -> Iterator[MetricsEndpoint]:
    endpoint = MetricsEndpoint(REGISTRY, host, 0)
    yield endpoint
    endpoint.close()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[MetricsEndpoint]:
    with listening(HOST) as endpoint:
        yield endpoint


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("GET", "/metrics", 200, TEXT),
        ("GET", "/metrics/", 404, b"only /metrics is served on this port\n"),
        ("GET", "/v2/health/ready", 404, b"only /metrics is served on this port\n"),
        ("POST", "/metrics", 405, b"# HTTP 405"),
    ],
)
def test_the_only_path(endpoint: MetricsEndpoint, method: str, path: str, status: int, body: bytes) -> None:
    answer = ask(endpoint.port, path, method=method)
    assert answer.status == status
    assert answer.body.startswith(body)
    assert answer.headers.get("content-type", "text/plain").startswith("text/plain")


@pytest.mark.parametrize("host", ["[::1]", "localhost"])
def test_other_addresses_can_be_listened_on(host: str) -> None:
    with listening(host) as endpoint:
        assert ask(endpoint.port, "/metrics", host=host.strip("[]")).body == TEXT
        shown = re.escape(f"cannot listen on {host}:{endpoint.port} for metrics: ")
        with pytest.raises(ServerError, match=rf"{shown}.*in use"):
            MetricsEndpoint(REGISTRY, host, endpoint.port)


def handlers() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_connections_are_limited(endpoint: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus._Handler, "timeout", 2.0)
    wait_until(lambda: not handlers())  # those of other tests
    with ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection((HOST, endpoint.port)))
            for _ in range(MAX_CONNECTIONS)
        ]
        wait_until(lambda: handlers() == MAX_CONNECTIONS)
        for connection in opened:
            connection.sendall(b"GET /metrics HTTP/1.0\r\nAccept: ")
        assert ask(endpoint.port, "/metrics").body == TEXT
        assert select.select(opened, [], [], 0)[0]
