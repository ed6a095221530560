"""The command lines: `python -m clients.enrich`, and `attention-client enrich` as the client installs it."""

import json
from pathlib import Path
from typing import Any

import pytest
from attention_client._commands.app import app as client_app
from typer.testing import CliRunner

from attention_serving.enrich.__main__ import app
from scripts.local_server import ServerProcess
from tests.clients.enrich.tables import assert_enriched, read, write
from tests.server.samples import SELF

QUERY = ["--model", SELF, "--column", "query"]


def run(command: Any, *arguments: object) -> Any:
    given = ["enrich", *arguments] if command is client_app else arguments
    return CliRunner().invoke(command, list(map(str, given)))


def test_a_job_in_process_prints_its_summary(tmp_path: Path, artifacts: Path) -> None:
    source, output = write(tmp_path, 20), tmp_path / "out.parquet"
    done = run(app, source, output, *QUERY, "--model-repository", artifacts)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith(f"{output}: 20 rows\n")
    assert f"model {SELF}, version 1; largest difference from golden vectors " in done.stdout
    assert "20 of 20 rows" in done.stderr
    assert_enriched(read(output), read(source))


@pytest.mark.parametrize("command", [app, client_app], ids=["application", "installed client"])
def test_a_job_on_a_server_prints_json(
    tmp_path: Path, server: ServerProcess, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = write(tmp_path, 20), tmp_path / "out.parquet"
    given = ["--server", f"{server.target}, {server.target},"]
    if command is client_app:
        given = []
        monkeypatch.setenv("ATTENTION_SERVER", server.target)
    done = run(command, source, output, *QUERY, *given, "--json", "--quiet")
    assert (done.exit_code, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert (summary["output"], summary["rows"], summary["already_complete"]) == (str(output), 20, False)
    assert_enriched(read(output), read(source))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "exactly one of --server and --model-repository is required"),
        ("--server x:1 --engine ray", "--engine needs --model-repository"),
        ("--server x:1 --workers 2", "--workers and --cores-per-worker need --engine='ray'"),
        ("--server x:1 --retry-seconds -1", "greater than or equal to 0"),
    ],
)
def test_wrong_usage_ends_with_2(options: str, words: str) -> None:
    done = run(app, "in.parquet", "out.parquet", *QUERY, *options.split())
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.replace("│", " ").split())
