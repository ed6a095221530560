"""The health check of containers."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from attention_serving.server import probe
from tests.clients.tls_server import tls_server
from tests.support.certificates import Authority, Mounted

HOST = "127.0.0.1"
Status = health_pb2.HealthCheckResponse


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[health.HealthServicer]:
    """The health service of a server whose port is that of the variable."""
    servicer, server = health.HealthServicer(), grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    monkeypatch.setenv("ATTENTION_PORT", str(server.add_insecure_port(f"{HOST}:0")))
    monkeypatch.setenv("http_proxy", f"http://{HOST}:9")  # the server is on this machine
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


def test_a_port_without_a_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:
        bound.bind((HOST, 0))  # bound, so that no other process listens on it
        monkeypatch.setattr("sys.argv", ["probe", f"{HOST}:{bound.getsockname()[1]}"])
        assert probe.main() == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


def test_the_probe_of_a_server_with_mutual_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It shows a certificate, takes any of the server, and knows the server's own variables."""
    clients = Authority("clients")
    client = Mounted(tmp_path / "client", clients.issue("probe.example"), b"")

    def run(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["probe", *arguments])
        return probe.main()

    pair = ["--certificate", str(client.certificate), "--key", str(client.key)]
    with tls_server(clients.pem, "attention.example") as server, monkeypatch.context() as variables:
        assert run(server.target, "--tls", *pair) == 0
        assert run(server.target, "--tls") == 1
        assert f"error: {server.target}: UNAVAILABLE" in capsys.readouterr().err
        variables.setenv("ATTENTION_PORT", server.target.partition(":")[2])
        variables.setenv("ATTENTION_TLS_CERTIFICATE", str(client.certificate))
        variables.setenv("ATTENTION_TLS_KEY", str(client.key))
        assert run() == 0
    assert run(server.target, "--tls") == 1
    assert f"error: {server.target}: [Errno 111] Connection refused" in capsys.readouterr().err
