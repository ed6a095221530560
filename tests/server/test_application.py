"""A server process from its start to its end: ports before models, signals, drains."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.server.shutdown import SIGNALS, StopRequest, handle_signals
from tests.server.observe.test_metrics import HOST, scrape, value
from tests.server.samples import ROOT, SELF
from tests.server.watched import Watched, watched

REQUEST = pb.AttendRequest(
    model_name=SELF,
    query=pb.VectorSequences(
        data_type=pb.DATA_TYPE_FP32, width=4, lengths=[2], data=np.ones((2, 4), np.float32).tobytes()
    ),
)
SERVING = health_pb2.HealthCheckResponse.SERVING
PROMPT_SECONDS = 2.0

pytestmark = pytest.mark.timeout(120)


class SlowRepository:
    """A repository with a model whose manifest cannot be read before `proceed`: loading blocks until then."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(source / SELF, folder / SELF)
        self._pipe = folder / SELF / "1" / "manifest.json"
        self._manifest = self._pipe.read_bytes()
        self._pipe.unlink()
        os.mkfifo(self._pipe)

    def proceed(self) -> None:
        self._pipe.write_bytes(self._manifest)


class OpenStream:
    """A stream on which one request has been answered."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._requests: SimpleQueue[pb.AttendStreamRequest | None] = SimpleQueue()
        self._requests.put(pb.AttendStreamRequest(request=REQUEST))
        self._call = AttentionServiceStub(channel).AttendStream(iter(self._requests.get, None), timeout=60)
        assert next(self._call).response.context_vectors.lengths == [2]

    def end(self) -> None:
        """Sends no more requests; the stream must end well."""
        self._requests.put(None)
        assert list(self._call) == []
        assert self._call.code() is grpc.StatusCode.OK

    def wait_for_drain(self) -> None:
        """The server ends the stream, because nothing is outstanding on it."""
        with pytest.raises(grpc.RpcError) as caught:
            next(self._call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        self._requests.put(None)


@pytest.fixture
def repository(artifacts: Path, tmp_path: Path) -> SlowRepository:
    return SlowRepository(artifacts, tmp_path / "models")


@pytest.fixture
def loading(repository: SlowRepository, tmp_path: Path) -> Iterator[Watched]:
    """A server that is loading its model."""
    with watched(repository.folder, tmp_path) as server:
        yield server


def test_ports_are_bound_and_metrics_served_while_models_load(
    loading: Watched, repository: SlowRepository
) -> None:
    port, metrics_port = loading.ports("ports bound")
    loading.until(" loading ")
    assert value(scrape(metrics_port), "attention_model_ready", model=SELF, version="1") == 0
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        health = health_pb2_grpc.HealthStub(channel).Check.future(health_pb2.HealthCheckRequest(), timeout=60)
        answer = AttentionServiceStub(channel).Attend.future(REQUEST, timeout=60)
        with socket.create_connection((HOST, port), timeout=60):  # bound, and not served yet
            assert not health.done()
        repository.proceed()
        assert health.result().status == SERVING
        assert answer.result().context_vectors.lengths == [2]
    assert loading.ports() == (port, metrics_port)
    assert value(scrape(metrics_port), "attention_model_ready", model=SELF, version="1") == 1


@pytest.mark.parametrize("option", ["--port", "--metrics-port"])
def test_a_port_in_use_fails_before_models_load(
    repository: SlowRepository, tmp_path: Path, option: str
) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with watched(repository.folder, tmp_path, f"{option}={port}") as server:
            assert server.process.wait(timeout=60) == 1
            said = server.rest()
    assert " ERROR cannot serve " in said
    assert f"cannot listen on {HOST}:{port}" in said
    assert " loading " not in said


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_while_models_load_ends_the_process_at_once(
    loading: Watched, number: signal.Signals
) -> None:
    loading.until(" loading ")
    started = time.monotonic()
    loading.stop(number)
    assert loading.process.wait(timeout=60) == 0
    assert time.monotonic() - started < PROMPT_SECONDS
    assert loading.rest().endswith(f" INFO stopped while loading signal={number.name}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_drains(artifacts: Path, tmp_path: Path, number: signal.Signals) -> None:
    with watched(artifacts, tmp_path, "--log-level=DEBUG") as server:
        port, _ = server.ports()
        with grpc.insecure_channel(f"{HOST}:{port}") as channel:
            stream = OpenStream(channel)
            server.stop(number)
            server.until(f" draining signal={number.name}$")
            stream.wait_for_drain()
        assert server.process.wait(timeout=60) == 0
        log = server.rest()
    ended = " DEBUG call ended method=/attention.v1.AttentionService/AttendStream code=UNAVAILABLE "
    assert ended in log
    assert log.index(" draining ") < log.index(" drained ") < log.index(" stopped\n")


@pytest.mark.parametrize(
    ("holder", "said"),
    [
        ("threading.Event().wait()", " ERROR ended: calls or runs did not end in time seconds=0.2\n"),
        # Native code that keeps the interpreter: no thread of Python can run.
        ("ctypes.PyDLL(None).sleep(50)", "Timeout (0:00:02.200000)!"),
    ],
    ids=["a thread", "native code"],
)
def test_a_process_that_cannot_end_is_ended_after_the_grace(holder: str, said: str) -> None:
    code = (
        "import ctypes, threading\n"
        "from attention_serving.server import shutdown\n"
        "from attention_serving.server.observe import logs\n"
        "logs.configure('INFO')\n"
        f"shutdown.end_after(0.2); {holder}"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == 1
    assert said in done.stderr


@pytest.fixture
def restored_handlers() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("restored_handlers")
@pytest.mark.parametrize(
    ("hangup", "expected"), [(signal.SIG_IGN, []), (signal.SIG_DFL, ["SIGHUP"])], ids=["ignored", "default"]
)
def test_a_hangup_that_was_ignored_at_startup_stays_ignored(
    hangup: Callable[..., None], expected: list[str]
) -> None:
    requests: list[StopRequest] = []
    signal.signal(signal.SIGHUP, hangup)
    handle_signals(requests.append)
    signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGTERM)
    assert [request.fields["signal"] for request in requests] == [*expected, "SIGTERM"]
