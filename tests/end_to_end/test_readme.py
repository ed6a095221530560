"""Runs the commands and the Python blocks of README and the other pages."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from scripts.local_server import ROOT, ServerProcess
from tests.support.eager import assert_parity
from tests.support.modules import ENCODER

DOCUMENTS = (
    "README.md",
    "clients/python/README.md",
    "docs/attention-weights.md",
    "docs/deploy-elsewhere.md",
    "docs/enrich.md",
)
REPOSITORY = "model_repository"
DOCUMENTED_TARGET = "127.0.0.1:8001"
TABLE = "embeddings.parquet"


def blocks(language: str) -> list[tuple[str, str]]:
    """Returns (document, text) of every fenced block of a language."""
    found = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        found += [(document, block) for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]
    return found


def commands() -> list[str]:
    """Returns the commands of the project's environment, except those that other tests run."""
    lines = [line for _, block in blocks("sh") for line in block.splitlines()]
    elsewhere = (
        "-m server",
        "my_encoder.py",  # the block of README that it is made of
        "-m clients.enrich",  # below, after the table is made
        "--weights bert.safetensors",  # in tests/export/test_checkpoint_command.py
        "--target torchserve",  # in tests/export/test_targets_torchserve.py
        "--query q.npy",  # in clients/python/tests/test_client_commands.py
    )
    return [
        line
        for line in lines
        if line.startswith((".venv/bin/", "attention-client "))
        and not any(command in line for command in elsewhere)
    ]


def run(code: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr


def test_there_is_something_to_run() -> None:
    assert len(blocks("python")) >= 4
    assert len(commands()) >= 4


@pytest.mark.parametrize(("document", "block"), blocks("python"), ids=lambda value: value[:16])
def test_python_block(server: ServerProcess, tmp_path: Path, document: str, block: str) -> None:
    assert document in DOCUMENTS
    code = block.replace(DOCUMENTED_TARGET, server.target)
    code = code.replace('infer("my-encoder"', f'infer("{ENCODER}"')  # the same module
    code = code.replace(f'out="{REPOSITORY}"', f'out="{tmp_path}"')
    run(code.replace(TABLE, f"{tmp_path}/{TABLE}"))


@pytest.mark.parametrize("command", commands())
def test_command(server: ServerProcess, tmp_path: Path, command: str) -> None:
    command = f"{Path(sys.executable).parent}/{command.removeprefix('.venv/bin/')}"
    command = command.replace("attention-client ", f"attention-client --server {server.target} ")
    command = command.replace(f"--out {REPOSITORY}", f"--out {tmp_path}")
    command = command.replace("--plot ", f"--plot {tmp_path}/")
    result = subprocess.run(
        ["/bin/sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_the_documented_enrichment_gives_equal_results_both_ways(
    server: ServerProcess, repository: Path, tmp_path: Path
) -> None:
    (code,) = [block for _, block in blocks("python") if TABLE in block]
    run(code.replace(TABLE, f"{tmp_path}/{TABLE}"))
    lines = [line for _, block in blocks("sh") for line in block.splitlines() if "-m clients.enrich" in line]
    assert len(lines) == 2
    for line in lines:
        command = re.sub(r"\b(\w+\.parquet)", rf"{tmp_path}/\1", line)
        command = command.replace(".venv/bin/", f"{Path(sys.executable).parent}/")
        command = command.replace(DOCUMENTED_TARGET, server.target)
        command = command.replace(f"--model-repository {REPOSITORY}", f"--model-repository {repository}")
        subprocess.run(["/bin/sh", "-c", command], cwd=ROOT, check=True, timeout=120)
    served, here = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("served", "here"))
    for one, other in zip(
        served["context_vectors"].to_pylist(), here["context_vectors"].to_pylist(), strict=True
    ):
        assert_parity(np.array(one), np.array(other))
