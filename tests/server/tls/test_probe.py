"""The health check of containers, for a server with TLS."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from attention_serving.server import probe
from tests.clients.tls_server import TlsServer
from tests.support.certificates import Authority, Mounted

CLIENTS = Authority("clients")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TlsServer]:
    """A server that requires a certificate, and whose own one has a public name."""
    server = TlsServer(tmp_path, CLIENTS.pem, "attention.example")
    yield server
    server.close()


@pytest.fixture
def client(tmp_path: Path) -> Mounted:
    return Mounted(tmp_path / "client", CLIENTS.issue("probe.example"), b"")


def test_the_probe_shows_a_certificate_and_takes_any_of_the_server(
    server: TlsServer, client: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = ["--certificate", str(client.certificate), "--key", str(client.key)]
    monkeypatch.setattr("sys.argv", ["probe", server.target, "--tls", *pair])
    assert probe.main() == 0


def test_the_variables_of_the_server_are_enough(
    server: TlsServer, client: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["probe"])
    monkeypatch.setenv("ATTENTION_PORT", str(server.port))
    monkeypatch.setenv("ATTENTION_TLS_CERTIFICATE", str(client.certificate))
    monkeypatch.setenv("ATTENTION_TLS_KEY", str(client.key))
    assert probe.main() == 0


def test_a_probe_without_a_certificate_is_refused(
    server: TlsServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["probe", server.target, "--tls"])
    assert probe.main() == 1
    assert f"error: {server.target}: UNAVAILABLE" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_not_healthy(
    server: TlsServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.close()
    monkeypatch.setattr("sys.argv", ["probe", server.target, "--tls"])
    assert probe.main() == 1
    assert f"error: {server.target}: [Errno 111] Connection refused" in capsys.readouterr().err
