"""Enrichment through servers with TLS and a token."""

from pathlib import Path
from typing import Any

import pytest
from attention_client import TlsFiles
from attention_client.enrich import EnrichError, enrich
from attention_client.enrich.cli import app
from typer.testing import CliRunner

from attention_serving.enrich import enrich as enrich_anywhere
from attention_serving.enrich.__main__ import app as repository_app
from scripts.local_server import serving
from tests.clients.enrich.tables import read, write
from tests.clients.tls_server import TlsServer
from tests.server.samples import SELF
from tests.support.certificates import Authority, Mounted

CLIENTS = Authority("clients")
QUERY: dict[str, Any] = {"model": SELF, "column": "query", "token": "secret"}
ARGUMENTS = ["--model", SELF, "--column", "query", "--token", "secret"]


def test_commands_and_functions_take_the_files(artifacts: Path, tmp_path: Path) -> None:
    authority = Authority()
    mounted = Mounted(tmp_path / "server", authority.issue(), CLIENTS.pem)
    client = Mounted(tmp_path / "client", CLIENTS.issue("job.example"), authority.pem)
    table, output = str(write(tmp_path, 20)), tmp_path / "out.parquet"
    with serving(artifacts, tmp_path / "log", *mounted.options) as server:
        given = [table, str(output), *ARGUMENTS, "--server", server.target, "--ca", str(client.ca)]
        given += ["--certificate", str(client.certificate), "--key", str(client.key)]
        done = CliRunner().invoke(repository_app, given)
        assert done.exit_code == 0, done.output
        assert read(output).num_rows == 20
        files = TlsFiles(ca=client.ca, certificate=client.certificate, key=client.key)
        wanted = {**QUERY, "servers": server.target, "overwrite": True, "retry_seconds": 0}
        assert enrich_anywhere(table, output, **wanted, credentials=files).rows == 20
        with pytest.raises(EnrichError, match=r"127\.0\.0\.1"):
            enrich(table, output, **wanted, credentials=TlsFiles(ca=client.ca))


def test_the_name_of_a_server_is_verified_and_not_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = TlsServer(tmp_path, CLIENTS.pem, "server.example")
    client = Mounted(tmp_path / "client", CLIENTS.issue("job.example"), server.authority.pem)
    files = TlsFiles(ca=client.ca, certificate=client.certificate, key=client.key)
    monkeypatch.setattr("attention_client.enrich.servers.resolve", lambda _: [server.target])
    wanted = {**QUERY, "model": "m", "credentials": files, "retry_seconds": 3}
    try:
        for name, expected in (
            ("server.example", "only streams and lists are served"),
            ("other.example", "(?i)verif|hostname|peer name"),
        ):
            with pytest.raises(EnrichError, match=expected):
                enrich(
                    write(tmp_path, 1), tmp_path / "out.parquet", **wanted, servers=f"{name}:{server.port}"
                )
    finally:
        server.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--server", "127.0.0.1:1", "--ca", "absent"], "absent: No such file or directory"),
        (["--server", "10.1.2.3:1"], "the connection to 10.1.2.3:1 is not encrypted"),
    ],
    ids=["missing file", "token without encryption"],
)
def test_a_connection_that_cannot_be_used_ends_the_job(
    tmp_path: Path, options: list[str], words: str
) -> None:
    given = [str(write(tmp_path, 1)), str(tmp_path / "out.parquet"), *ARGUMENTS, *options]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 1
    assert words in done.stderr
    assert "secret" not in done.stderr


def test_the_files_need_servers() -> None:
    with pytest.raises(EnrichError, match="credentials and token need servers"):
        enrich_anywhere("in", "out", **QUERY, model_repository="models")
