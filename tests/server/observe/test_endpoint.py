"""The port for metrics: one path, and a bounded number of connections, none of which takes long."""

import itertools
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest
from prometheus_client import CollectorRegistry, Gauge

from attention_serving.server.api.calls import CallLoad
from attention_serving.server.engine.events import EngineLoad
from attention_serving.server.errors import ServerError
from attention_serving.server.observe import prometheus
from attention_serving.server.observe.metrics import Metrics
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


def test_connections_are_limited_and_slow_ones_end(
    endpoint: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that send a byte now and then."""
    monkeypatch.setattr(prometheus, "CONNECTION_SECONDS", 2.0)
    wait_until(lambda: not handlers())  # those of other tests
    with ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection((HOST, endpoint.port)))
            for _ in range(MAX_CONNECTIONS)
        ]
        wait_until(lambda: handlers() == MAX_CONNECTIONS)
        answered = threading.Event()

        def scrape() -> None:
            assert ask(endpoint.port, "/metrics").body == TEXT
            answered.set()

        scraping = threading.Thread(target=scrape)
        scraping.start()
        until = time.monotonic() + 8
        while not answered.wait(0.1) and time.monotonic() < until:
            for connection in opened:
                with suppress(OSError):  # it was ended
                    connection.sendall(b"G")
        assert answered.is_set()
        assert select.select(opened, [], [], 0)[0]
    scraping.join()


def test_scrapes_at_the_same_time_are_all_answered() -> None:
    """While counts rise between them."""
    metrics, hits = Metrics(), itertools.count()
    metrics.watch(lambda: EngineLoad(context_hits=next(hits)), CallLoad)
    endpoint = MetricsEndpoint(metrics.registry, HOST, 0, metrics.refresh)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads take turns in the middle of a refresh
    try:
        with ThreadPoolExecutor(4) as pool:
            statuses = list(pool.map(lambda _: ask(endpoint.port, "/metrics").status, range(200)))
    finally:
        sys.setswitchinterval(interval)
        endpoint.close()
    assert statuses == [200] * 200
    assert metrics.registry.get_sample_value("attention_context_hits_total") == next(hits) - 1
