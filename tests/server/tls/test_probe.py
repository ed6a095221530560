"""The health check of containers, for a server with TLS."""

from pathlib import Path

import pytest

from attention_serving.server import probe
from tests.clients.tls_server import TlsServer
from tests.support.certificates import Authority, Mounted

CLIENTS = Authority("clients")


def test_the_probe_of_a_server_with_mutual_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It shows a certificate, takes any of the server, and knows the server's own variables."""
    server = TlsServer(tmp_path, CLIENTS.pem, "attention.example")
    client = Mounted(tmp_path / "client", CLIENTS.issue("probe.example"), b"")

    def run(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["probe", *arguments])
        return probe.main()

    pair = ["--certificate", str(client.certificate), "--key", str(client.key)]
    assert run(server.target, "--tls", *pair) == 0
    assert run(server.target, "--tls") == 1
    assert f"error: {server.target}: UNAVAILABLE" in capsys.readouterr().err
    with monkeypatch.context() as variables:
        variables.setenv("ATTENTION_PORT", str(server.port))
        variables.setenv("ATTENTION_TLS_CERTIFICATE", str(client.certificate))
        variables.setenv("ATTENTION_TLS_KEY", str(client.key))
        assert run() == 0
    server.close()
    assert run(server.target, "--tls") == 1
    assert f"error: {server.target}: [Errno 111] Connection refused" in capsys.readouterr().err
