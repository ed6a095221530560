"""The command lines: `python -m clients.enrich`, and `attention-client enrich` as the client installs it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attention_client.enrich.cli import app as client_app
from typer.testing import CliRunner

from attention_serving.enrich.__main__ import app
from scripts.local_server import ServerProcess
from tests.clients.enrich.tables import assert_enriched, read, write
from tests.server.samples import ROOT, SELF, TEXT

QUERY = ["--model", SELF, "--column", "query"]


def run(command: Any, *arguments: object) -> Any:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_a_job_in_process_prints_its_summary(tmp_path: Path, enrich_models: Path) -> None:
    source, output = write(tmp_path, 20), tmp_path / "out.parquet"
    arguments = [source, output, *QUERY, "--model-repository", enrich_models]
    done = run(app, *arguments)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith(f"{output}: 20 rows\n")
    assert f"model {SELF}, version 1; largest difference from eager PyTorch " in done.stdout
    assert "20 of 20 rows" in done.stderr
    assert_enriched(read(output), read(source), SELF, ["query"])
    done = run(app, *arguments, "--resume", "--quiet")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "the job is already complete, nothing was computed" in done.stdout
    done = run(app, *arguments)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"error: {output} exists: --overwrite (overwrite=True) replaces it\n"


@pytest.mark.parametrize("command", [app, client_app], ids=["application", "installed client"])
def test_a_job_on_a_server_prints_json(tmp_path: Path, sample_server: ServerProcess, command: Any) -> None:
    source, output = write(tmp_path, 20), tmp_path / "out.parquet"
    servers = f"{sample_server.target}, {sample_server.target},"
    done = run(command, source, output, *QUERY, "--server", servers, "--json", "--quiet")
    assert (done.exit_code, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert (summary["output"], summary["rows"], summary["already_complete"]) == (str(output), 20, False)
    assert_enriched(read(output), read(source), SELF, ["query"])


def test_the_client_takes_the_server_from_the_environment(
    tmp_path: Path, sample_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTENTION_SERVER", sample_server.target)
    done = run(client_app, write(tmp_path, 3), tmp_path / "out.parquet", *QUERY)
    assert done.exit_code == 0, done.stderr


def test_paths_are_printed_as_they_were_given(
    tmp_path: Path, enrich_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, 3, text=["Life is short", None, "unheard"])
    arguments = ["--model", TEXT, "--column", "text", "--model-repository", enrich_models, "--quiet"]
    done = run(app, "./table.parquet", "./out.parquet", *arguments, "--on-error", "skip")
    assert done.exit_code == 0, done.stderr
    first, *_, null, refused = done.stdout.splitlines()
    assert first == "./out.parquet: 3 rows"
    assert null == "1 row is null: nothing to compute"
    assert refused == "1 row was refused: ./out.parquet.rejects.jsonl"
    assert json.loads(Path("out.parquet.rejects.jsonl").read_text())["file"] == "./table.parquet"
    done = run(app, "table.parquet", "out.arrow", *arguments, "--on-error", "skip", "--max-errors", "0")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: 1 row was refused, more than max_errors=0; the last is row 2: ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "exactly one of --server and --model-repository is required"),
        (["--server", "x:1", "--model-repository", "y"], "exactly one of --server and --model-repository"),
        (["--server", "x:1", "--engine", "ray"], "--engine needs --model-repository"),
        (["--server", "x:1", "--provider", "cuda"], "--provider needs --model-repository"),
        (["--server", "x:1", "--workers", "2"], "--workers and --cores-per-worker need --engine='ray'"),
        (["--server", "x:1", "--pool", "median"], "median"),
        (["--server", "x:1", "--max-errors", "3"], "--max-errors needs --on-error='skip'"),
        (["--server", "x:1", "--on-error", "skip", "--max-errors", "-1"], "greater than or equal to 0"),
        (["--model-repository", "y", "--cores-per-worker", "0"], "greater than or equal to 1"),
        (["--server", "x:1", "--retry-seconds", "-1"], "greater than or equal to 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_ends_with_2(options: list[str], words: str) -> None:
    done = run(app, "in.parquet", "out.parquet", *QUERY, *options)
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.replace("│", " ").split())


def test_help_needs_neither_pyarrow_nor_a_runtime() -> None:
    """The options can be read before the extras are complete."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(['pyarrow', 'onnxruntime', 'ray', 'torch']))"
    script = f"{blocked}; from attention_serving.enrich.__main__ import app; app(['--help'])"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert b"--max-errors" in done.stdout
