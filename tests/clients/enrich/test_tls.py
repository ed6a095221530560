"""Enrichment through servers with TLS and a token."""

from pathlib import Path

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

CLIENTS, TOKEN = Authority("clients"), "secret"


def test_every_command_and_function_takes_the_files(artifacts: Path, tmp_path: Path) -> None:
    authority = Authority()
    mounted = Mounted(tmp_path / "server", authority.issue(), CLIENTS.pem)
    client = Mounted(tmp_path / "client", CLIENTS.issue("job.example"), authority.pem)
    table = write(tmp_path, 20)
    with serving(artifacts, tmp_path / "log", *mounted.options) as server:
        given = [str(table), "--model", SELF, "--column", "query", "--server", server.target]
        given += ["--ca", str(client.ca), "--certificate", str(client.certificate), "--key", str(client.key)]
        for number, command in enumerate((app, repository_app)):
            output = tmp_path / f"{number}.parquet"
            done = CliRunner().invoke(command, [*given, str(output), "--token", "secret"])
            assert done.exit_code == 0, done.output
            assert read(output).num_rows == 20
        files = TlsFiles(ca=client.ca, certificate=client.certificate, key=client.key)
        for number, function in enumerate((enrich, enrich_anywhere)):
            output = tmp_path / f"function-{number}.parquet"
            summary = function(
                str(table),
                str(output),
                model=SELF,
                column="query",
                servers=server.target,
                credentials=files,
                token=TOKEN,
            )
            assert summary.rows == 20
        with pytest.raises(EnrichError, match=r"127\.0\.0\.1"):
            enrich(
                str(table),
                str(tmp_path / "none.parquet"),
                model=SELF,
                column="query",
                servers=server.target,
                credentials=TlsFiles(ca=client.ca),
                retry_seconds=0,
            )


def test_the_name_of_a_server_is_verified_and_not_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = TlsServer(tmp_path, CLIENTS.pem, "server.example")
    client = Mounted(tmp_path / "client", CLIENTS.issue("job.example"), server.authority.pem)
    files = TlsFiles(ca=client.ca, certificate=client.certificate, key=client.key)
    monkeypatch.setattr("attention_client.enrich.servers.resolve", lambda _: [server.target])
    try:
        for name, expected in (
            ("server.example", "only streams and lists are served"),
            ("other.example", "(?i)verif|hostname|peer name"),
        ):
            with pytest.raises(EnrichError, match=expected):
                enrich(
                    str(write(tmp_path, 1)),
                    str(tmp_path / "out.parquet"),
                    model="m",
                    column="query",
                    servers=f"{name}:{server.port}",
                    credentials=files,
                    token=TOKEN,
                    retry_seconds=3,
                )
    finally:
        server.close()


def test_files_that_cannot_be_used_end_the_job(tmp_path: Path) -> None:
    given = [str(write(tmp_path, 1)), str(tmp_path / "out.parquet"), "--model", SELF, "--column", "query"]
    done = CliRunner().invoke(app, [*given, "--server", "127.0.0.1:1", "--ca", str(tmp_path / "absent")])
    assert done.exit_code == 1
    assert "absent: No such file or directory" in done.stderr


def test_a_token_needs_encryption_or_a_server_on_this_machine(tmp_path: Path) -> None:
    given = [str(write(tmp_path, 1)), str(tmp_path / "out.parquet"), "--model", SELF, "--column", "query"]
    done = CliRunner().invoke(app, [*given, "--server", "10.1.2.3:1", "--token", "secret"])
    assert done.exit_code == 1
    assert "the connection to 10.1.2.3:1 is not encrypted" in done.stderr
    assert "secret" not in done.stderr


def test_the_files_need_servers(tmp_path: Path) -> None:
    given = [str(tmp_path / "in.parquet"), str(tmp_path / "out.parquet"), "--model", SELF]
    given += ["--column", "query", "--model-repository", str(tmp_path)]
    done = CliRunner().invoke(repository_app, [*given, "--tls"])
    assert done.exit_code == 2
    with pytest.raises(EnrichError, match="credentials and token need servers"):
        enrich_anywhere("in", "out", model=SELF, column="query", model_repository=tmp_path, token=TOKEN)
