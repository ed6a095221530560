"""Several worker processes: one service, whatever happens to any of them."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.multiprocess import MultiProcessCollector

from protos.attention.v1 import attention_pb2 as pb
from protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from scripts.local_server import serving
from tests.server.samples import CROSS, SELF, TEXT
from tests.server.test_metrics import HOST, scrape, value
from tests.server.workers.watched import Watched, watched

WORKERS = "--workers=2"
ATTEND = "/attention.v1.AttentionService/Attend"
REQUEST = pb.AttendRequest(
    model_name=SELF,
    query=pb.VectorSequences(
        data_type=pb.DATA_TYPE_FP32, width=4, lengths=[2], data=np.ones((2, 4), np.float32).tobytes()
    ),
)
# Should all go to one of two workers, chance has failed once in 2 ** 31 times.
CONNECTIONS = 32
SERVING = health_pb2.HealthCheckResponse.SERVING

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a service puts its temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def service(artifacts: Path, tmp_path: Path, temporary: Path) -> Iterator[Watched]:  # noqa: ARG001 - set
    with watched(artifacts, tmp_path, WORKERS) as service:
        yield service


def connection(port: int) -> grpc.Channel:
    """A connection of its own, which channels to one address otherwise share."""
    return grpc.insecure_channel(f"{HOST}:{port}", [("grpc.use_local_subchannel_pool", 1)])


def call(port: int, times: int) -> None:
    """Calls over as many connections; each is answered."""
    for _ in range(times):
        with connection(port) as channel:
            assert AttentionServiceStub(channel).Attend(REQUEST, timeout=30).context_vectors.lengths == [2]


def calls_by_worker(temporary: Path) -> list[float]:
    """What each worker has counted, from its own file."""
    files = sorted(temporary.glob("attention-metrics-*/counter_*.db"))
    families = [MultiProcessCollector.merge([str(file)]) for file in files]  # type: ignore[no-untyped-call]
    return [
        sample.value
        for family in families
        for metric in family
        for sample in metric.samples
        if sample.labels.get("method") == ATTEND
    ]


def test_calls_reach_every_worker_and_their_metrics_add_up(
    artifacts: Path, tmp_path: Path, temporary: Path
) -> None:
    with serving(artifacts, tmp_path / "log", WORKERS) as server:
        call(server.port, CONNECTIONS)
        samples = scrape(server.metrics_port)
        by_worker = calls_by_worker(temporary)
        with connection(server.port) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            assert check(health_pb2.HealthCheckRequest(), timeout=30).status == SERVING
        assert server.stop() == 0
    assert len(by_worker) == 2
    assert min(by_worker) > 0
    assert sum(by_worker) == CONNECTIONS
    assert value(samples, "attention_requests_total", method=ATTEND, code="OK") == CONNECTIONS
    assert value(samples, "attention_request_seconds_count", method=ATTEND) == CONNECTIONS
    assert value(samples, "attention_batch_sequences_sum", model=SELF) == CONNECTIONS
    assert value(samples, "attention_workers", state="ready") == 2
    assert value(samples, "attention_workers", state="starting") == 0
    for model in (SELF, CROSS, TEXT):
        assert value(samples, "attention_model_ready", model=model, version="1") == 1
    assert not list(temporary.iterdir())


def test_none_listens_before_all_are_ready(service: Watched) -> None:
    port, _ = service.ports()
    before, _, _ = "".join(service.seen).partition(" listening ")
    for model in (SELF, CROSS, TEXT):
        assert before.count(f" model ready model={model} ") == 2
    call(port, 1)


def test_all_drain_when_the_service_is_asked_to_end(service: Watched) -> None:
    port, _ = service.ports()
    requests: SimpleQueue[pb.AttendStreamRequest | None] = SimpleQueue()
    requests.put(pb.AttendStreamRequest(request=REQUEST))
    with connection(port) as channel:
        stream = AttentionServiceStub(channel).AttendStream(iter(requests.get, None), timeout=60)
        assert next(stream).response.context_vectors.lengths == [2]
        service.terminate()
        service.until(" draining signal=SIGTERM$")
        drained = service.until(r" stopped worker=(\d)")[1]
        assert service.process.poll() is None  # for the stream is open
        requests.put(None)
        assert list(stream) == []
        assert stream.code() is grpc.StatusCode.OK
    assert service.process.wait(timeout=60) == 0
    rest = service.rest()
    assert f" stopped worker={1 - int(drained)}\n" in rest
    assert rest.endswith(" stopped\n")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port))


def test_a_worker_that_dies_is_missed_by_nobody_and_comes_back(service: Watched, temporary: Path) -> None:
    first, second = service.pids(2)
    port, metrics_port = service.ports()
    call(port, CONNECTIONS)
    os.kill(first, signal.SIGKILL)
    reason = "reason='worker 0 was killed by signal 9' next_in_seconds=0.5"
    assert reason in service.until(" worker ended worker=0 .*").string
    call(port, CONNECTIONS)
    (third,) = service.pids(1)
    assert third not in (first, second)
    service.until(" listening .* worker=0")
    before = calls_by_worker(temporary)
    call(port, CONNECTIONS)
    after = calls_by_worker(temporary)
    assert all(new > old for new, old in zip(after, before, strict=True))
    samples = scrape(metrics_port)
    assert value(samples, "attention_requests_total", method=ATTEND, code="OK") == 3 * CONNECTIONS
    service.terminate()
    assert service.process.wait(timeout=60) == 0


def test_no_worker_outlives_its_supervisor(service: Watched) -> None:
    port, _ = service.ports()
    service.process.kill()
    said = service.rest()  # which ends with the last process that could write
    assert [f" stopped worker={worker}\n" in said for worker in range(2)] == [True, True]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port))


def test_a_service_that_is_asked_to_end_while_it_loads_ends(service: Watched) -> None:
    service.pids(2)
    service.terminate()
    assert service.process.wait(timeout=60) == 0
    assert " listening " not in service.rest()


def test_a_worker_that_dies_before_all_serve_ends_the_service(service: Watched) -> None:
    _, second = service.pids(2)
    os.kill(second, signal.SIGKILL)
    assert service.process.wait(timeout=60) == 1
    assert service.rest().endswith("ERROR cannot serve reason='worker 1 was killed by signal 9'\n")


@pytest.mark.parametrize("option", ["--port", "--metrics-port"])
def test_a_port_that_is_taken_is_an_error(artifacts: Path, tmp_path: Path, option: str) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with watched(artifacts, tmp_path, WORKERS, f"{option}={port}") as service:
            assert service.process.wait(timeout=60) == 1
            said = service.rest()
    assert said.count("\n") == 1
    assert f"ERROR cannot serve reason='cannot listen on {HOST}:{port}" in said


def test_a_repository_that_cannot_load_ends_the_service_with_its_reason(
    tmp_path: Path, temporary: Path
) -> None:
    with watched(tmp_path / "absent", tmp_path, WORKERS) as service:
        assert service.process.wait(timeout=60) == 1
        said = service.rest()
    assert said.count("ERROR") == 1
    assert (
        f"ERROR cannot serve reason='model repository {tmp_path}/absent does not exist or is not a folder'"
        in said
    )
    assert not list(temporary.iterdir())
