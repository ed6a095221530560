"""Several worker processes form one service, even when some of them end."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.multiprocess import MultiProcessCollector

from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from tests.server.observe.test_metrics import HOST, Samples, scrape, value
from tests.server.samples import CROSS, SELF, TEXT
from tests.server.test_application import REQUEST, SERVING, OpenStream
from tests.server.watched import Watched, watched

WORKERS = "--workers=2"
ATTEND = "/attention.v1.AttentionService/Attend"
# The probability that all connections reach the same one of two workers is 1 in 2 ** 31.
CONNECTIONS = 32

pytestmark = pytest.mark.timeout(120)


@contextmanager
def two_workers(repository: Path, folder: Path, *options: str) -> Iterator[Watched]:
    """A service whose temporary files are in a folder of its own."""
    temporary_folder(folder).mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary_folder(folder)))
        with watched(repository, folder, WORKERS, *options) as service:
            yield service


def temporary_folder(folder: Path) -> Path:
    return folder / "temporary"


@pytest.fixture
def service(artifacts: Path, tmp_path: Path) -> Iterator[Watched]:
    with two_workers(artifacts, tmp_path, "--log-level=DEBUG") as service:
        yield service


def connection(port: int) -> grpc.Channel:
    """A connection of its own. By default, channels to one address share one."""
    return grpc.insecure_channel(f"{HOST}:{port}", [("grpc.use_local_subchannel_pool", 1)])


def call(service: Watched, port: int, *, total: int) -> None:
    """Makes a call on each of several connections; returns when the service has counted `total` calls."""
    for _ in range(CONNECTIONS):
        with connection(port) as channel:
            assert AttentionServiceStub(channel).Attend(REQUEST, timeout=30).context_vectors.lengths == [2]
    # A call is counted after its reply has been sent, and logged after it has been counted.
    service.matches(rf" DEBUG call ended method={ATTEND} code=OK ", total)


def counted(metrics_port: int, total: int) -> Samples:
    """The samples once they contain `total` calls: workers publish with each heartbeat.

    Each kind of metric has a file of its own: one scrape may see calls in one that are not in another yet.
    """
    deadline = time.monotonic() + 60
    names = (
        ("attention_requests_total", {"method": ATTEND, "code": "OK"}),
        ("attention_request_seconds_count", {"method": ATTEND}),
        ("attention_batch_sequences_sum", {"model": SELF}),
    )
    while True:
        samples = scrape(metrics_port)
        found = [samples.get((name, frozenset(labels.items())), 0.0) for name, labels in names]
        if min(found) == total:
            return samples
        assert max(found) <= total
        assert time.monotonic() < deadline, found


def calls_by_worker(folder: Path) -> list[float]:
    """The number of calls that each worker has counted, from its own file."""
    files = sorted(temporary_folder(folder).glob("attention-metrics-*/counter_*.db"))
    families = [MultiProcessCollector.merge([str(file)]) for file in files]  # type: ignore[no-untyped-call]
    return [
        sample.value
        for family in families
        for metric in family
        for sample in metric.samples
        if sample.labels.get("method") == ATTEND
    ]


def test_calls_reach_every_worker_and_their_metrics_add_up(service: Watched, tmp_path: Path) -> None:
    port, metrics_port = service.ports()
    before, _, _ = "".join(service.seen).partition(" listening ")
    for model in (SELF, CROSS, TEXT):  # no worker listens before all are ready
        assert before.count(f" model ready model={model} ") == 2
    call(service, port, total=CONNECTIONS)
    samples = counted(metrics_port, CONNECTIONS)
    by_worker = calls_by_worker(tmp_path)
    with connection(port) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        assert check(health_pb2.HealthCheckRequest(), timeout=30).status == SERVING
    service.stop()
    assert service.process.wait(timeout=60) == 0
    assert len(by_worker) == 2
    assert min(by_worker) > 0
    assert sum(by_worker) == CONNECTIONS
    assert value(samples, "attention_workers", state="ready") == 2
    assert value(samples, "attention_workers", state="starting") == 0
    for model in (SELF, CROSS, TEXT):
        assert value(samples, "attention_model_ready", model=model, version="1") == 1
    assert not list(temporary_folder(tmp_path).iterdir())


def test_every_worker_drains(service: Watched) -> None:
    port, _ = service.ports()
    with connection(port) as channel:
        stream = OpenStream(channel)
        service.stop()
        service.until(" draining signal=SIGTERM$")
        stream.wait_for_drain()
    assert service.process.wait(timeout=60) == 0
    rest = service.rest()
    for worker in range(2):
        assert f" stopped worker={worker}\n" in rest
    assert rest.endswith(" stopped\n")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port))


def test_calls_succeed_while_a_worker_is_replaced(service: Watched, tmp_path: Path) -> None:
    first, second = service.pids(2)
    port, metrics_port = service.ports()
    call(service, port, total=CONNECTIONS)
    counted(metrics_port, CONNECTIONS)
    os.kill(first, signal.SIGKILL)
    reason = "reason='worker 0 was killed by signal 9' restart_in_seconds=0.5"
    assert reason in service.until(" worker ended worker=0 .*").string
    call(service, port, total=2 * CONNECTIONS)
    assert service.pids(3)[2] not in (first, second)
    service.matches(" listening .* worker=0", 2)
    counted(metrics_port, 2 * CONNECTIONS)
    before = calls_by_worker(tmp_path)
    call(service, port, total=3 * CONNECTIONS)
    counted(metrics_port, 3 * CONNECTIONS)
    after = calls_by_worker(tmp_path)
    assert all(new > old for new, old in zip(after, before, strict=True))


def test_a_stopped_worker_is_killed_and_replaced(artifacts: Path, tmp_path: Path) -> None:
    with two_workers(artifacts, tmp_path, "--log-level=DEBUG", "--worker-timeout-seconds=5") as service:
        first, _ = service.pids(2)
        port, metrics_port = service.ports()
        call(service, port, total=CONNECTIONS)
        os.kill(first, signal.SIGSTOP)
        assert "reason='worker 0 did not answer for " in service.until(" worker ended worker=0 .*").string
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        service.matches(" listening .* worker=0", 2)
        call(service, port, total=2 * CONNECTIONS)
        samples = scrape(metrics_port)
        assert value(samples, "attention_worker_restarts_total", reason="unresponsive") == 1
        assert value(samples, "attention_worker_restarts_total", reason="killed") == 0


def test_a_worker_that_is_stopped_while_it_loads_is_killed(artifacts: Path, tmp_path: Path) -> None:
    with two_workers(artifacts, tmp_path, "--worker-timeout-seconds=0.5") as service:
        first, _ = service.pids(2)
        os.kill(first, signal.SIGSTOP)
        assert service.process.wait(timeout=60) == 1
        assert "cannot serve reason='worker 0 did not answer for " in service.rest()


def test_a_stopped_worker_does_not_hold_up_the_end(artifacts: Path, tmp_path: Path) -> None:
    with two_workers(artifacts, tmp_path, "--grace-seconds=1") as service:
        first, second = service.pids(2)
        service.ports()
        for worker in (first, second):
            os.kill(worker, signal.SIGSTOP)
        started = time.monotonic()
        service.stop()
        assert service.process.wait(timeout=60) == 0
        assert time.monotonic() - started < 30  # both are waited for at the same time
        said = service.rest()
    for worker in range(2):
        assert f" ERROR worker killed: it did not end in time worker={worker}\n" in said
    assert not list(temporary_folder(tmp_path).iterdir())


def test_the_load_of_every_worker_is_published(service: Watched) -> None:
    port, metrics_port = service.ports()
    with ExitStack() as stack:
        streams = [OpenStream(stack.enter_context(connection(port))) for _ in range(CONNECTIONS)]
        deadline = time.monotonic() + 60
        while (found := value(scrape(metrics_port), "attention_open_streams")) != CONNECTIONS:
            assert time.monotonic() < deadline, found
        for stream in streams:
            stream.end()


def test_no_worker_outlives_the_supervisor(service: Watched, tmp_path: Path) -> None:
    port, _ = service.ports()
    assert len(list(temporary_folder(tmp_path).iterdir())) == 1
    service.process.kill()
    said = service.rest()  # ends when the last process that could write has ended
    assert not list(temporary_folder(tmp_path).iterdir())
    assert [f" stopped worker={worker}\n" in said for worker in range(2)] == [True, True]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_while_models_load_ends_the_service(service: Watched, number: signal.Signals) -> None:
    service.pids(2)
    service.stop(number)
    assert service.process.wait(timeout=60) == 0
    said = service.rest()
    assert f" draining signal={number.name}\n" in said
    assert " listening " not in said


def test_a_supervisor_that_is_killed_while_models_load_leaves_nothing(
    service: Watched, tmp_path: Path
) -> None:
    service.pids(2)
    service.process.kill()
    service.rest()
    assert not list(temporary_folder(tmp_path).iterdir())


def test_a_worker_that_ends_before_all_serve_ends_the_service(service: Watched) -> None:
    _, second = service.pids(2)
    os.kill(second, signal.SIGKILL)
    assert service.process.wait(timeout=60) == 1
    assert service.rest().endswith("ERROR cannot serve reason='worker 1 was killed by signal 9'\n")


@pytest.mark.parametrize("option", ["--port", "--metrics-port"])
def test_a_port_in_use_fails_before_a_worker_starts(artifacts: Path, tmp_path: Path, option: str) -> None:
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


def test_a_repository_that_cannot_be_loaded_ends_the_service_with_the_reason(tmp_path: Path) -> None:
    with two_workers(tmp_path / "absent", tmp_path) as service:
        assert service.process.wait(timeout=60) == 1
        said = service.rest()
    assert said.count("ERROR") == 1
    reason = f"model repository {tmp_path}/absent does not exist or is not a folder"
    assert f"ERROR cannot serve reason='{reason}'" in said
    assert not list(temporary_folder(tmp_path).iterdir())
