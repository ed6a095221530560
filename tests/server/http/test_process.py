"""The HTTP process beside a server: it starts with it, is replaced, drains, and ends with it."""

import gzip
import os
import re
import resource
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.chaos.process import readings, reset_peak
from tests.server.http.clients import HOST, REQUEST, answer_on, ask, connected, head
from tests.server.samples import SELF
from tests.server.seams import wait_until
from tests.server.watched import Watched, watched
from tests.support.prometheus import scrape

PATH = f"/v2/models/{SELF}/infer"
MIB = 1 << 20
# A request in the midst of its body, and the rest of it.
BODY = b'{"inputs":[{"name":"query","shape":[1,1,4],"datatype":"FP32","data":[1,2,3,4]}]}'
BEGUN = head(PATH, f"Content-Length: {len(BODY)}") + BODY[:9]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def service(artifacts: Path, tmp_path: Path) -> Iterator[Watched]:
    with watched(artifacts, tmp_path, "--http-port=0") as running:
        yield running


def http_port(service: Watched, event: str = "serving") -> int:
    return int(service.until(rf" {event} .*\bhttp_port=(\d+)")[1])


def http_pid(service: Watched, number: int = 1) -> int:
    """The id of the HTTP process that was started as the first, second, ..."""
    return int(service.matches(r" http process started .*\bpid=(\d+)", number)[-1][1])


def test_it_serves_is_replaced_drains_and_ends(service: Watched) -> None:
    port = http_port(service, "ports bound")
    assert ask(port, PATH, REQUEST).status == 200  # which waited for the server
    os.kill(http_pid(service), signal.SIGKILL)
    service.until(" WARNING http process ended .*reason='http process was killed by signal 9'")
    http_pid(service, 2)
    with connected(port) as connection, connected(port) as idle:
        idle.sendall(head("/v2/health/live", method="GET"))
        assert answer_on(idle).status == 200
        connection.sendall(BEGUN)
        service.stop()
        service.until(" draining ")
        assert idle.recv(1) == b""  # idle connections are closed, and the drain has begun
        connection.sendall(BODY[9:])
        assert answer_on(connection).status == 200
    assert service.process.wait(timeout=60) == 0
    rest = service.rest()
    assert rest.count("http process ended") == 1
    assert -1 < rest.find(" drained ") < rest.find(" stopped")


@pytest.mark.parametrize("workers", [1, 2])
def test_what_either_process_refuses_is_counted_once(artifacts: Path, tmp_path: Path, workers: int) -> None:
    with watched(artifacts, tmp_path, "--http-port=0", f"--workers={workers}") as service:
        port = http_port(service)
        metrics = int(re.findall(r" metrics_port=(\d+)", service.seen[-1])[0])
        assert {ask(port, PATH, b"{").status for _ in range(3)} == {400}
        assert ask(port, "/v2/models/unknown/infer", REQUEST).status == 404

        def refusals() -> dict[str, float]:
            samples, name = scrape(metrics).items(), "attention_refused_requests_total"
            return {dict(labels)["reason"]: count for (metric, labels), count in samples if metric == name}

        wait_until(lambda: len(refusals()) == 2)
        metrics = port  # the same page
        assert refusals() == {"INVALID_FIELD": 3, "MODEL_NOT_FOUND": 1}


@pytest.mark.thorough
def test_compressed_bodies_do_not_take_more_memory_than_is_reserved(artifacts: Path, tmp_path: Path) -> None:
    body = gzip.compress(bytes(128 * MIB))
    options = ("--http-port=0", "--max-message-bytes=128MiB", "--max-in-flight-bytes=128MiB")
    with watched(artifacts, tmp_path, *options) as service:
        port, pid = http_port(service), http_pid(service)
        ask(port, PATH, REQUEST)
        idle = reset_peak(pid)
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(ask, port, PATH, body, {"Content-Encoding": "gzip"}) for _ in range(4)]
            statuses = [answer.result().status for answer in answers]
        peak = readings(pid).peak - idle
    assert set(statuses) <= {413, 503}
    assert peak < (128 + 64) * MIB


@pytest.mark.thorough
def test_without_descriptors_connections_wait_and_the_log_has_an_event_a_second(service: Watched) -> None:
    port = int(service.until(r" serving .*\bport=(\d+) metrics_port=")[1])
    http = int(re.findall(r"http_port=(\d+)", service.seen[-1])[0])
    assert ask(http, "/v2").status == 200
    for pid in (service.process.pid, http_pid(service)):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (64, 64))
    with ExitStack() as stack:
        for number in range(400):
            stack.enter_context(connected((port, http)[number % 2]))
        events = service.matches(" ERROR .*accept.* out of system resource", 4)
    first, *_, last = (datetime.fromisoformat(event.string.split()[0]) for event in events)
    assert last - first >= timedelta(seconds=2.5)
    assert ask(http, "/v2").status == 200
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        metadata: Any = channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")
        assert metadata(b"", timeout=60, wait_for_ready=True)


@pytest.mark.thorough
def test_calls_avoid_a_stopped_worker_also_if_nobody_kills_it(artifacts: Path, tmp_path: Path) -> None:
    options = ("--http-port=0", "--workers=2", "--worker-timeout-seconds=0")
    with watched(artifacts, tmp_path, *options) as service:
        port = http_port(service)
        started = [ask(port, "/v2") for _ in range(16)]
        assert [answer.status for answer in started] == [200] * 16, [answer.body for answer in started]
        os.kill(service.pids(2)[0], signal.SIGSTOP)
        answers = [ask(port, "/v2") for _ in range(32)]
        statuses = [answer.status for answer in answers]
        assert set(statuses[:16]) <= {200, 503, 504}
        # By then, each connection has had two calls, and one of these took longer than the ping's timeout.
        assert statuses[16:] == [200] * 16, [answer.body for answer in answers]
