"""Runs the blocks of README in their order in one folder, and commands and Python blocks of other pages."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from scripts.export_demo_models import export_demo_models
from scripts.local_server import ROOT, ServerProcess, serving
from tests.support.artifacts import ModelSet, cached_repositories, link_tree
from tests.support.eager import assert_parity

DOCUMENTS = (
    "clients/python/README.md",
    "docs/attention-weights.md",
    "docs/deploy-elsewhere.md",
    "docs/enrich.md",
)
REPOSITORY = "model_repository"
DOCUMENTED_TARGET = "127.0.0.1:8001"


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
        "-m clients.enrich",  # their tables are made by README's blocks
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
    assert blocks("python")
    assert commands()


@pytest.mark.parametrize(("document", "block"), blocks("python"), ids=lambda value: value[:16])
def test_python_block(server: ServerProcess, tmp_path: Path, document: str, block: str) -> None:
    assert document in DOCUMENTS
    code = block.replace(DOCUMENTED_TARGET, server.target)
    code = code.replace(f'out="{REPOSITORY}"', f'out="{tmp_path}"')
    run(code)


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


@pytest.mark.timeout(1200)
def test_the_blocks_of_readme_work_in_their_order(tmp_path: Path) -> None:
    """As a new user pastes them, after `make demo` and beside the server of the second shell."""
    for entry in ROOT.iterdir():
        if entry.name not in (REPOSITORY, "build", ".git"):
            (tmp_path / entry.name).symlink_to(entry)
    (demo,) = cached_repositories(ModelSet("demo", [export_demo_models]))
    models = tmp_path / REPOSITORY
    link_tree(demo, models)
    found = re.findall(r"```(sh|python)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(found) > 8
    options = ("--model-control=poll", "--repository-poll-seconds=1")
    with serving(models, tmp_path / "log", *options) as server:
        environment = {**os.environ, "ATTENTION_SERVER": server.target}
        for language, block in found:
            if block.startswith("make ") or "-m server" in block:
                continue
            text = block.replace(DOCUMENTED_TARGET, server.target)
            text = text.replace(".venv/bin/", f"{Path(sys.executable).parent}/")
            program = [sys.executable, "-c", text] if language == "python" else ["/bin/sh", "-ec", text]
            result = subprocess.run(
                program,
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert result.returncode == 0, f"{block}\n{result.stderr}"
    served, here = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("served", "here"))
    for one, other in zip(
        served["context_vectors"].to_pylist(), here["context_vectors"].to_pylist(), strict=True
    ):
        assert_parity(np.array(one), np.array(other))
