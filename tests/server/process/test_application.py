"""A server process from its start to its end: ports before models, signals, drains."""

import os
import shutil
import socket
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from tests.server.api.messages import attend_request
from tests.server.http.clients import ask
from tests.server.samples import SELF
from tests.server.watched import watched
from tests.support.prometheus import scrape, value

REQUEST = attend_request([2])
HOST = "127.0.0.1"
SERVING = health_pb2.HealthCheckResponse.SERVING

# An address of gRPC has no place for most of these characters, and a socket none for so many.
UNUSUAL = "%41#?:,[" + "t" * 100

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
