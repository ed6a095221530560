"""A service from its start to its end, in one process or in several that form one."""

import os
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.server import __main__ as main
from attention_serving.server import machine
from attention_serving.server.process.workers import Workers, share_of_machine
from attention_serving.server.settings import Settings
from tests.server.api.messages import attend_request
from tests.server.api.served import ATTEND, OpenStream
from tests.server.http.clients import HOST, ask
from tests.server.samples import SELF
from tests.server.seams import wait_until
from tests.server.watched import Watched, watched
from tests.support.prometheus import Samples, calls_ended, scrape, value

REQUEST = attend_request([2])
SERVING = health_pb2.HealthCheckResponse.SERVING

# An address of gRPC has no place for most of these characters, and a socket none for so many.
UNUSUAL = "%41#?:,[" + "t" * 100
# The probability that all connections reach the same one of two workers is 1 in 2 ** 31.
CONNECTIONS = 32

pytestmark = pytest.mark.timeout(120)


def remains(temporary: Path) -> list[Path]:
    """What is in the folder of temporary files beside copies of artifacts, which other servers may use."""
    return [path for path in temporary.iterdir() if path.name != f"attention-models-{os.getuid()}"]


@pytest.mark.parametrize(
    ("options", "cores", "threads"),
    [
        ({"workers": 2}, [{0, 1}, {4, 5, 6}], [2, 2]),
        ({"workers": 3, "threads": 7}, [{0}, {1, 4}, {5, 6}], [7, 7, 7]),
        ({"workers": 7}, [{0}, {0}, {1}, {4}, {4}, {5}, {6}], [1] * 7),
    ],
    ids=["divided", "given threads", "more than cores"],
)
def test_each_worker_has_its_own_cores_and_its_share_of_the_quota_in_threads(
    options: dict[str, int], cores: list[set[int]], threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5, 6})
    monkeypatch.setattr(machine, "available_cores", lambda: 4)
    settings = Settings.model_validate({"model_repository": "m", **options})
    shares = [share_of_machine(settings, worker) for worker in range(settings.workers)]
    assert [set(share) for share, _ in shares] == cores
    assert [share for _, share in shares] == threads


@pytest.mark.parametrize(
    ("options", "devices", "variables"),
    [
        ("--workers=0 --provider=cuda", ["GPU-a", "3"], ["GPU-a", "3"]),
        ("--workers=3 --provider=auto", ["MIG-a", "MIG-b"], ["MIG-a", "MIG-b", "MIG-a"]),
        ("--workers=2 --provider=cuda", ["0"], [None, None]),
        ("--workers=2 --provider=cuda", [], [None, None]),
    ],
    ids=["one for each", "in turn", "one device", "none"],
)
def test_workers_use_the_devices_in_turn(
    options: str,
    devices: list[str],
    variables: list[str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    services: list[Workers] = []
    monkeypatch.setattr(main, "visible_devices", lambda: devices)
    monkeypatch.setattr(main, "run", services.append)
    for effect in ("logs.configure", "resource.setrlimit", "handle_signals"):  # on this process
        monkeypatch.setattr(f"{main.__name__}.{effect}", lambda *_: None)
    given = dict(option.removeprefix("--").split("=") for option in options.split())
    assert main.serve(Settings.model_validate({"model_repository": tmp_path, "port": 0, **given})) == 0
    (service,) = services
    service.bind(tmp_path)
    assert [worker.variables.get("CUDA_VISIBLE_DEVICES") for worker in service._workers] == variables
    service.close()


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of the service, with a path that is short enough for sockets."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def two_workers(repository: Path, folder: Path, *options: str) -> AbstractContextManager[Watched]:
    return watched(repository, folder, "--workers=2", "--log-requests=all", *options)


@pytest.fixture
def service(artifacts: Path, tmp_path: Path) -> Iterator[Watched]:
    with two_workers(artifacts, tmp_path) as service:
        yield service


def connection(port: int) -> grpc.Channel:
    """A connection of its own. By default, channels to one address share one."""
    return grpc.insecure_channel(f"{HOST}:{port}", [("grpc.use_local_subchannel_pool", 1)])


def call(service: Watched, port: int, *, total: int) -> Counter[str]:
    """Makes a call on each of several connections; returns how many each worker took, of `total`."""
    for _ in range(CONNECTIONS):
        with connection(port) as channel:
            assert AttentionServiceStub(channel).Attend(REQUEST, timeout=30).context_vectors.lengths == [2]
    # A call is counted after its reply has been sent, and logged after it has been counted.
    pattern = rf" INFO request .*method={ATTEND[1:]} .*code=OK .*worker=(\d)"
    return Counter(found[1] for found in service.matches(pattern, total))


def counted(metrics_port: int, total: int) -> Samples:
    """The samples once they contain `total` calls: workers publish with each heartbeat."""
    wait_until(lambda: calls_ended(metrics_port, method=ATTEND) == total)
    return scrape(metrics_port)


def test_calls_reach_every_worker_and_all_of_them_drain(service: Watched, temporary: Path) -> None:
    port, metrics_port = service.ports()
    by_worker = call(service, port, total=CONNECTIONS)
    samples = counted(metrics_port, CONNECTIONS)
    with connection(port) as channel:
        stream = OpenStream(channel)
        stream.ask()
        service.stop()
        service.until(" draining signal=SIGTERM$")
        assert stream.replies.code() is grpc.StatusCode.UNAVAILABLE  # nothing is outstanding on it
        stream.end()
    assert service.process.wait(timeout=60) == 0
    rest = service.rest()
    assert [rest.count(f" stopped worker={worker}\n") for worker in range(2)] == [1, 1]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port))
    assert by_worker.keys() == {"0", "1"}
    assert value(samples, "attention_workers", state="ready") == 2
    assert value(samples, "attention_workers", state="starting") == 0
    assert value(samples, "attention_model_ready", model=SELF, version="1") == 1
    assert remains(temporary) == []


@pytest.mark.thorough
def test_a_worker_that_was_killed_or_stopped_is_replaced(artifacts: Path, tmp_path: Path) -> None:
    with two_workers(artifacts, tmp_path, "--worker-timeout-seconds=2") as service:
        first, second = service.pids(2)
        port, metrics_port = service.ports()
        call(service, port, total=CONNECTIONS)
        counted(metrics_port, CONNECTIONS)  # what is not published yet ends with its worker
        os.kill(first, signal.SIGKILL)
        reason = "reason='worker 0 was killed by signal 9'"
        assert reason in service.until(" worker ended worker=0 .*").string
        before = call(service, port, total=2 * CONNECTIONS)  # while it is replaced
        counted(metrics_port, 2 * CONNECTIONS)
        os.kill(second, signal.SIGSTOP)
        assert "reason='worker 1 did not answer for " in service.until(" worker ended worker=1 .*").string
        with pytest.raises(ProcessLookupError):
            os.kill(second, 0)
        service.matches(" listening ", 4)
        latest = call(service, port, total=3 * CONNECTIONS) - before
        samples = counted(metrics_port, 3 * CONNECTIONS)
    assert latest.keys() == {"0", "1"}
    for reason in ("killed", "unresponsive"):
        assert value(samples, "attention_worker_restarts_total", reason=reason) == 1


@pytest.mark.thorough
def test_stopped_workers_do_not_hold_up_the_end(artifacts: Path, tmp_path: Path, temporary: Path) -> None:
    with two_workers(artifacts, tmp_path, "--grace-seconds=1") as service:
        pids = service.pids(2)
        service.ports()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        service.stop()
        assert service.process.wait(timeout=60) == 0
        assert time.monotonic() - started < 30  # both are waited for at the same time
        said = service.rest()
    for worker in range(2):
        assert f" ERROR worker killed: it did not end in time worker={worker}\n" in said
    assert remains(temporary) == []


@pytest.mark.thorough
@pytest.mark.parametrize("is_serving", [True, False], ids=["serving", "loading"])
def test_no_process_is_orphaned(artifacts: Path, tmp_path: Path, temporary: Path, is_serving: bool) -> None:
    with two_workers(artifacts, tmp_path, "--http-port=0") as service:
        service.pids(2)
        if is_serving:
            service.until(" http process started ")
        assert len(remains(temporary)) == 1
        service.process.kill()
        service.rest()  # ends when the last process that could write has ended
    assert remains(temporary) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("target", "number", "status", "said"),
    [
        ("service", signal.SIGTERM, 0, " draining signal=SIGTERM\n"),
        ("worker", signal.SIGKILL, 1, "cannot serve reason='worker 1 was killed by signal 9'\n"),
    ],
    ids=["signal", "killed worker"],
)
def test_what_happens_while_models_load_ends_the_service(
    artifacts: Path, tmp_path: Path, target: str, number: signal.Signals, status: int, said: str
) -> None:
    with two_workers(artifacts, tmp_path) as service:
        _, second = service.pids(2)
        os.kill(second if target == "worker" else service.process.pid, number)
        assert service.process.wait(timeout=60) == status
        log = service.rest()
    assert said in log
    assert " listening " not in log


# Why a service cannot start: its options, and what it says.
CAUSES = {
    "port": ("--port={port}", "cannot listen on 127.0.0.1:{port}"),
    "metrics port": ("--metrics-port={port}", "cannot listen on 127.0.0.1:{port} for metrics"),
    "repository": ("--model-repository={folder}/absent", "model repository {folder}/absent does not exist"),
    "certificate": ("--tls-certificate={folder}/c --tls-key={folder}/c", "{folder}/c: cannot be read"),
    "public address": ("--host=0.0.0.0", "0.0.0.0 can be reached from other machines"),
    "device": ("--provider=cuda", "--provider cuda: "),
    "tokens": ("--tokens={folder}/absent", "{folder}/absent: cannot be read"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("options", "said"), CAUSES.values(), ids=CAUSES)
def test_a_service_that_cannot_start_says_why_once_before_it_loads(
    artifacts: Path, tmp_path: Path, temporary: Path, options: str, said: str, workers: int
) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind((HOST, 0))
        other.listen()
        names = {"port": other.getsockname()[1], "folder": tmp_path}
        given = options.format(**names).split()
        with two_workers(artifacts, tmp_path, *given, f"--workers={workers}") as service:
            assert service.process.wait(timeout=60) == 1
            log = service.rest()
    assert log.count("ERROR") == log.count(f"ERROR cannot serve reason='{said.format(**names)}") == 1
    assert " loading " not in log
    assert remains(temporary) == []


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


def test_ports_are_bound_and_metrics_served_while_models_load(artifacts: Path, tmp_path: Path) -> None:
    repository = SlowRepository(artifacts, tmp_path / "models")
    with watched(repository.folder, tmp_path) as server:
        port, metrics_port = server.ports("ports bound")
        server.until(" loading ")
        assert value(scrape(metrics_port), "attention_model_ready", model=SELF, version="1") == 0
        with grpc.insecure_channel(f"{HOST}:{port}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            health = check.future(health_pb2.HealthCheckRequest(), timeout=60)
            answer = AttentionServiceStub(channel).Attend.future(REQUEST, timeout=60)
            with socket.create_connection((HOST, port), timeout=60):  # bound, and not served yet
                assert not health.done()
            repository.proceed()
            assert health.result().status == SERVING
            assert answer.result().context_vectors.lengths == [2]
        assert server.ports() == (port, metrics_port)
        assert value(scrape(metrics_port), "attention_model_ready", model=SELF, version="1") == 1


def test_a_stop_while_models_load_ends_the_process_and_leaves_nothing(
    artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "t"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    repository = SlowRepository(artifacts, tmp_path / "models")
    with watched(repository.folder, tmp_path, "--http-port=0") as server:
        server.until(" loading ")
        assert list(temporary.glob("attention-????????/grpc-0"))
        server.stop()
        assert server.process.wait(timeout=60) == 0
        assert " stopped while loading signal=SIGTERM" in server.rest()
    assert list(temporary.iterdir()) == []


def test_http_is_answered_whatever_the_path_of_temporary_files(
    artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / UNUSUAL
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with watched(artifacts, tmp_path, "--http-port=0") as server:
        http = int(server.until(r" serving .*\bhttp_port=(\d+)")[1])
        assert ask(http, "/v2").status == 200
