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


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[health.HealthServicer]:
    """The health service of a server whose port is that of the variable."""
    servicer, server = health.HealthServicer(), grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    monkeypatch.setenv("ATTENTION_PORT", str(server.add_insecure_port(f"{HOST}:0")))
    monkeypatch.setattr("sys.argv", ["probe"])
    server.start()
    yield servicer
    server.stop(0).wait()


@pytest.mark.parametrize(
    ("status", "said"), [(Status.SERVING, ""), (Status.NOT_SERVING, "the server reports NOT_SERVING\n")]
)
def test_a_server_is_healthy_if_it_serves(
    service: health.HealthServicer, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    service.set("", status)
    assert probe.main() == (1 if said else 0)
    assert capsys.readouterr().err.endswith(said)


def test_a_port_without_a_server_is_not_healthy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as bound:
        bound.bind((HOST, 0))  # bound, so that no other process listens on it
        monkeypatch.setattr("sys.argv", ["probe", f"{HOST}:{bound.getsockname()[1]}"])
        assert probe.main() == 1
    assert "UNAVAILABLE" in capsys.readouterr().err
