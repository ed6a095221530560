"""The generated code is up to date, and can be imported with the client's copy."""

import subprocess
import sys
from pathlib import Path

import pytest

from attention_serving.protos.generate import TARGETS, generated

ROOT = Path(__file__).resolve().parents[2]
CLIENT_COPY = "attention_client._generated.attention.v1.attention_pb2"
SERVER_COPY = "attention_serving.protos.attention.v1.attention_pb2"


@pytest.mark.parametrize(("folder", "package", "sources"), TARGETS, ids=["server", "client"])
def test_the_generated_code_is_up_to_date(folder: Path, package: str, sources: tuple[str, ...]) -> None:
    fresh = generated(package, sources)
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*_pb2*.py*")}
    assert {name: code for name, code in found.items() if "__pycache__" not in name} == fresh


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param((SERVER_COPY, CLIENT_COPY), id="server-then-client"),
        pytest.param(("tritonclient.grpc", "attention_client"), id="triton-then-client"),
    ],
)
def test_a_fresh_process_can_import_both(modules: tuple[str, str]) -> None:
    command = [sys.executable, "-c", "; ".join(f"import {module}" for module in modules)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
