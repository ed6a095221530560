"""The HTTP process beside a server: it starts with it, is replaced, drains, and ends with it."""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from attention_serving.server.http.child import options_of
from attention_serving.server.settings import Settings
from tests.server.http.clients import HOST, answer_on, ask, connected, head, tensor
from tests.server.http.scripted import Blocked, Front, Scripted, front
from tests.server.http.test_inference import QUERY
from tests.server.samples import ROOT, SELF
from tests.server.watched import Watched, watched

PATH = f"/v2/models/{SELF}/infer"
REQUEST = {"inputs": [tensor("query", QUERY)]}
# A request in the midst of its body, and the rest of it.
BODY = b'{"inputs":[{"name":"query","shape":[1,1,4],"datatype":"FP32","data":[1,2,3,4]}]}'
BEGUN = head(PATH, f"Content-Length: {len(BODY)}") + BODY[:9]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=[(), ("--workers=2",)], ids=["alone", "workers"])
def service(artifacts: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Watched]:
    with watched(artifacts, tmp_path, "--http-port=0", *request.param) as running:
        yield running


@pytest.fixture
def alone(artifacts: Path, tmp_path: Path) -> Iterator[Watched]:
    with watched(artifacts, tmp_path, "--http-port=0") as running:
        yield running


def http_port(service: Watched) -> int:
    return int(service.until(r" serving .*\bhttp_port=(\d+)")[1])


def http_pid(service: Watched, number: int = 1) -> int:
    """The id of the HTTP process that was started as the first, second, ..."""
    return int(service.matches(r" http process started .*\bpid=(\d+)", number)[-1][1])


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ended(pid: int) -> bool:
    """Waits until a process that is not ours has ended."""
    until = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not is_running(pid)


def test_it_serves_is_replaced_and_ends(service: Watched) -> None:
    port = http_port(service)
    assert ask(port, PATH, REQUEST).status == 200
    first = http_pid(service)
    os.kill(first, signal.SIGKILL)
    service.until(
        r" ERROR http process ended .*reason='http process was killed by signal 9' restart_in_seconds=0.5"
    )
    second = http_pid(service, 2)
    assert ask(port, PATH, REQUEST).status == 200
    service.stop()
    assert service.process.wait(timeout=60) == 0
    assert not is_running(second)
    log = service.rest()
    assert " stopped" in log
    assert log.count("http process ended") == 1


def test_connections_wait_for_the_process(alone: Watched) -> None:
    port = int(alone.until(r" ports bound .*\bhttp_port=(\d+)")[1])
    assert ask(port, "/v2/health/ready").json == {"ready": True}


def test_a_drain_answers_a_request_whose_body_is_on_its_way(alone: Watched) -> None:
    port = http_port(alone)
    with connected(port) as connection, connected(port) as idle:
        idle.sendall(head("/v2/health/live", method="GET"))
        assert answer_on(idle).status == 200
        connection.sendall(BEGUN)
        alone.stop()
        alone.until(" draining ")
        assert idle.recv(1) == b""  # idle connections are closed, and the drain has begun
        connection.sendall(BODY[9:])
        assert answer_on(connection).status == 200
    assert alone.process.wait(timeout=60) == 0


def test_a_terminated_process_answers_and_is_replaced(alone: Watched) -> None:
    port = http_port(alone)
    with connected(port) as connection, connected(port) as idle:
        idle.sendall(head("/v2/health/live", method="GET"))
        assert answer_on(idle).status == 200
        connection.sendall(BEGUN)
        os.kill(http_pid(alone), signal.SIGTERM)
        assert idle.recv(1) == b""
        connection.sendall(BODY[9:])
        assert answer_on(connection).status == 200
    alone.until(" http process ended .*reason='http process ended with status 0'")
    assert ask(port, PATH, REQUEST).status == 200


def test_it_ends_with_a_server_that_is_killed(service: Watched) -> None:
    port = http_port(service)
    assert ask(port, PATH, REQUEST).status == 200
    pid = http_pid(service)
    service.stop(signal.SIGKILL)
    service.process.wait(timeout=60)
    assert ended(pid)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_port_in_use_ends_the_server_before_models_load(
    artifacts: Path, tmp_path: Path, workers: str
) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with watched(artifacts, tmp_path, f"--http-port={port}", f"--workers={workers}") as service:
            assert service.process.wait(timeout=60) == 1
            log = service.rest()
    assert " ERROR cannot serve " in log
    assert f"cannot listen on {HOST}:{port} for HTTP: Address already in use" in log
    assert " loading " not in log


def test_the_command_cannot_listen() -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "server.http", "--target=x:1", f"--port={port}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"cannot listen on {HOST}:{port} for HTTP: Address already in use" in done.stderr


def test_a_signal_lets_requests_finish(scripted: Scripted, scripted_front: Front) -> None:
    blocked = scripted.behaviours["ModelInfer"] = Blocked()
    with connected(scripted_front.port) as connection, connected(scripted_front.port) as idle:
        idle.sendall(head("/v2/health/live", method="GET"))
        assert answer_on(idle).status == 200
        connection.sendall(head(PATH, f"Content-Length: {len(BODY)}") + BODY)
        while scripted.next().method != "ModelInfer":
            pass
        scripted_front.process.terminate()
        assert idle.recv(1) == b""
        with pytest.raises(ConnectionError):
            ask(scripted_front.port, "/v2")
        blocked.release()
        assert answer_on(connection).status == 200
        assert connection.recv(1) == b""
    assert scripted_front.process.wait(timeout=60) == 0


def test_the_grace_ends(scripted: Scripted) -> None:
    blocked = scripted.behaviours["ModelInfer"] = Blocked()
    target = f"{HOST}:{scripted.port}"
    with front(target, "--grace-seconds=0") as running, connected(running.port) as connection:
        connection.sendall(head(PATH, f"Content-Length: {len(BODY)}") + BODY)
        scripted.next()
        running.process.terminate()
        answer = answer_on(connection)
        assert answer.status == 503
        assert answer.error == "the server is shutting down; retry on another server"
        assert running.process.wait(timeout=60) == 0
    assert blocked.cancelled.wait(60)


def test_a_grpc_server_that_is_not_there(scripted: Scripted, scripted_front: Front) -> None:
    assert ask(scripted_front.port, "/v2").status == 200
    scripted.close()
    for path, body in (("/v2/health/live", None), (PATH, REQUEST)):
        answer = ask(scripted_front.port, path, body)
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"


def test_an_unix_socket_is_the_target(artifacts: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with watched(artifacts, tmp_path, "--http-port=0", f"--unix-socket={path}") as service:
        assert ask(http_port(service), PATH, REQUEST).status == 200


@pytest.mark.parametrize(
    ("given", "target", "connections"),
    [
        ({}, "127.0.0.1:7", 1),
        ({"host": "0.0.0.0"}, "127.0.0.1:7", 1),  # noqa: S104
        ({"host": "[::]"}, "[::1]:7", 1),
        ({"host": "::1"}, "[::1]:7", 1),
        ({"host": "localhost", "workers": 3}, "localhost:7", 12),
        ({"unix_socket": "/a/b"}, "unix:/a/b", 1),
    ],
)
def test_the_target_of_a_server(given: dict[str, object], target: str, connections: int) -> None:
    options = options_of(Settings.model_validate({"model_repository": ".", **given}), 7)
    assert (options.target, options.connections) == (target, connections)


def test_http_is_off_by_default(artifacts: Path, tmp_path: Path) -> None:
    with watched(artifacts, tmp_path) as service:
        service.until(" serving ")
        service.stop()
        service.process.wait(timeout=60)
        assert "http" not in service.rest()


def test_without_descriptors_connections_wait_and_the_log_has_a_line_a_second(alone: Watched) -> None:
    port = int(alone.until(r" serving .*\bport=(\d+) metrics_port=")[1])
    http = int(re.findall(r"http_port=(\d+)", alone.seen[-1])[0])
    assert ask(http, "/v2").status == 200
    for pid in (alone.process.pid, http_pid(alone)):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (64, 64))
    known = len(alone.seen)
    with ExitStack() as stack:
        for number in range(400):
            stack.enter_context(connected((port, http)[number % 2]))
        alone.matches(" connections wait |accept.* out of system resource", 4)
        lines = alone.seen[known:]
    times = [datetime.fromisoformat(line.split()[0]) for line in lines]
    assert times[-1] - times[0] >= timedelta(seconds=2.5)
    assert len(lines) == 4
    assert ask(http, "/v2").status == 200
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        metadata: Any = channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")
        assert metadata(b"", timeout=60, wait_for_ready=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stopped_http_process_is_killed_and_replaced(artifacts: Path, tmp_path: Path, workers: int) -> None:
    options = ("--http-port=0", f"--workers={workers}", "--worker-timeout-seconds=2")
    with watched(artifacts, tmp_path, *options) as service:
        port = http_port(service)
        assert ask(port, "/v2").status == 200
        os.kill(http_pid(service), signal.SIGSTOP)
        service.until(
            " ERROR http process ended .*reason='http process did not answer for .* and was killed' "
        )
        assert http_pid(service, 2)
        assert ask(port, "/v2").status == 200


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
