"""What the README tells people to run, run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.local_server import ROOT, ServerProcess

DOCUMENTS = ("README.md", "clients/python/README.md", "docs/attention-weights.md")
DOCUMENTED_TARGET = "127.0.0.1:8001"


def blocks(language: str) -> list[tuple[str, str]]:
    """(document, text) of every fenced block of a language."""
    found = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        found += [(document, block) for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]
    return found


def commands() -> list[str]:
    """Commands of the project's own environment, but those that other tests run."""
    lines = [line for _, block in blocks("sh") for line in block.splitlines()]
    elsewhere = (
        "-m server",
        "--weights bert.safetensors",
    )  # the latter in tests/export/test_checkpoint_command.py
    return [
        line
        for line in lines
        if line.startswith(".venv/bin/") and not any(command in line for command in elsewhere)
    ]


def test_there_is_something_to_run() -> None:
    assert len(blocks("python")) >= 4
    assert len(commands()) >= 4


@pytest.mark.parametrize(("document", "block"), blocks("python"), ids=lambda value: value[:16])
def test_python_block(server: ServerProcess, tmp_path: Path, document: str, block: str) -> None:
    assert document in DOCUMENTS
    code = block.replace(DOCUMENTED_TARGET, server.target).replace('out="artifacts"', f'out="{tmp_path}"')
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", commands())
def test_command(server: ServerProcess, tmp_path: Path, command: str) -> None:
    command = command.replace(".venv/bin/", f"{Path(sys.executable).parent}/")
    command = command.replace("attention-client ", f"attention-client --server {server.target} ")
    command = command.replace("--out artifacts", f"--out {tmp_path}")
    command = command.replace("--plot ", f"--plot {tmp_path}/")
    result = subprocess.run(
        ["/bin/sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
