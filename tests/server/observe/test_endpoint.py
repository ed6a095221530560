"""The port for metrics and its connections, and the metrics that several processes write, added up."""

import itertools
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge, values

from attention_serving.server.api.calls import CallLoad
from attention_serving.server.engine.events import CallEvent, EngineLoad
from attention_serving.server.errors import ServerError
from attention_serving.server.observe import prometheus
from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.observe.prometheus import (
    FOLDER_VARIABLE,
    MAX_CONNECTIONS,
    MetricsEndpoint,
    create_files,
    remove_gauges,
    worker_registry,
    write_metrics_to,
)
from tests.server.http.clients import HOST, ask
from tests.server.samples import ROOT
from tests.server.seams import wait_until
from tests.support.prometheus import shows

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


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Restores what `write_metrics_to` changes in the process."""
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))


def work(folder: Path, worker: int, *, calls: int, is_ready: bool) -> None:
    """Does what a process does that starts as this worker, counts calls, and publishes its load."""
    write_metrics_to(folder, worker)
    metrics = Metrics()
    for _ in range(calls):
        metrics.events.add(CallEvent("/a/B", "OK", 0.5))
    if not is_ready:
        metrics.loading([("m", "1")])
    load = EngineLoad(queue_depth=calls, queue_age_seconds=calls / 4)
    metrics.watch(lambda: load, lambda: CallLoad(open_calls=calls))
    metrics.refresh()


def test_counts_and_loads_add_up_and_other_gauges_show_the_worst_worker(tmp_path: Path) -> None:
    for worker in range(2):
        create_files(tmp_path, worker)
    work(tmp_path, 0, calls=2, is_ready=True)
    work(tmp_path, 1, calls=3, is_ready=False)
    assert shows(
        worker_registry(tmp_path),
        """
        attention_requests_total{method="/a/B",code="OK"} 5
        attention_request_seconds_count{method="/a/B"} 5
        attention_request_seconds_sum{method="/a/B"} 2.5
        attention_queue_depth 5
        attention_open_calls 5
        attention_queue_age_seconds 0.75
        attention_model_ready{model="m",version="1"} 0
        """,
    )
    remove_gauges(tmp_path, 1)
    assert shows(worker_registry(tmp_path), "attention_open_calls 2\nattention_queue_age_seconds 0.5")
    for _ in range(2):  # replacements of it, which go on with its counts and its files
        work(tmp_path, 1, calls=1, is_ready=True)
    assert shows(
        worker_registry(tmp_path),
        """
        attention_requests_total{method="/a/B",code="OK"} 7
        attention_request_seconds_sum{method="/a/B"} 3.5
        attention_open_calls 3
        """,
    )
    assert all(path.is_symlink() for path in tmp_path.iterdir())  # all of it is in memory


WITHOUT_SPACE = """
import os, sys
from contextlib import suppress
from pathlib import Path
from attention_serving.server.observe.prometheus import *
from tests.support.prometheus import published, value

folder = Path(sys.argv[1])
create_files(folder, 0)
write_metrics_to(folder, 0)
from attention_serving.server.engine.events import CallEvent
from attention_serving.server.observe.metrics import Metrics
metrics = Metrics()
with suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
    while True:
        filler.write(bytes(4096))
assert os.statvfs(folder).f_bavail == 0
for number in range(2000):
    metrics.events.add(CallEvent(f"/a/{number}", "OK", 0.5))
metrics.refresh()
print(value(published(worker_registry(folder)), "attention_requests_total", method="/a/1999", code="OK"))
"""


def test_metrics_of_a_worker_grow_on_a_full_disk(tmp_path: Path) -> None:
    """In a real file system, which is mounted for one process."""
    mount = 'mount -t tmpfs -o size=256k none "$0" && exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*command, mount, tmp_path, "true"], capture_output=True, check=False).returncode:
        pytest.skip("the system allows this user no mounts")
    command += [mount, str(tmp_path), sys.executable, "-c", WITHOUT_SPACE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1.0\n"), done.stderr
