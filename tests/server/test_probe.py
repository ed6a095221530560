"""The health check of containers."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from attention_serving.server import probe

HOST = "127.0.0.1"
Status = health_pb2.HealthCheckResponse


class HealthServer:
    """A gRPC server with nothing but the health service."""

    def __init__(self) -> None:
        self._service = health.HealthServicer()
        self._server = grpc.server(ThreadPoolExecutor(1))
        health_pb2_grpc.add_HealthServicer_to_server(self._service, self._server)
        self.port = self._server.add_insecure_port(f"{HOST}:0")
        self._server.start()

    def report(self, status: int) -> None:
        self._service.set("", status)

    def close(self) -> None:
        self._server.stop(0).wait()


@pytest.fixture
def server() -> Iterator[HealthServer]:
    server = HealthServer()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["probe"])


@pytest.mark.parametrize("by_variable", [True, False], ids=["variable", "argument"])
def test_a_serving_server_is_healthy(
    server: HealthServer, monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    server.report(Status.SERVING)
    if by_variable:
        monkeypatch.setenv("ATTENTION_PORT", str(server.port))
    else:
        monkeypatch.setattr("sys.argv", ["probe", f"{HOST}:{server.port}"])
    assert probe.main() == 0


def test_a_server_that_drains_is_not_healthy(
    server: HealthServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.report(Status.NOT_SERVING)
    monkeypatch.setenv("ATTENTION_PORT", str(server.port))
    assert probe.main() == 1
    assert capsys.readouterr().err == f"error: {HOST}:{server.port}: the server reports NOT_SERVING\n"


def test_a_port_without_a_server_is_not_healthy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as bound:
        bound.bind((HOST, 0))  # bound, so that no other process listens on it
        monkeypatch.setenv("ATTENTION_PORT", str(bound.getsockname()[1]))
        assert probe.main() == 1
    assert "UNAVAILABLE" in capsys.readouterr().err
