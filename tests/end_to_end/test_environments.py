"""What installed programs need and write: the client alone; no identifier of telemetry."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from scripts.local_server import ROOT, ServerProcess
from tests.support.processes import run_python

PROGRAM = """
import sys
import numpy as np
import pyarrow as pa
from attention_client import AttentionClient
from attention_client.enrich import enrich

with AttentionClient(sys.argv[1]) as client:
    result = client.attend("self-attention", np.ones((3, 16), np.float32), return_weights=True)
print(result.context_vectors.shape, result.attention_weights.shape)
table = pa.table({"c": [[[1.0] * 16] * 3]})
summary = enrich(table, model="self-attention", column="c", servers=[sys.argv[1]])
print(np.array(summary.table["context_vectors"].to_pylist()).shape)
"""


@pytest.mark.thorough
def test_the_client_works_in_an_environment_that_holds_nothing_else(
    server: ServerProcess, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv")
    python = str(tmp_path / "venv/bin/python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    install = [*pip, "install", "--quiet", "--no-compile", f"{ROOT / 'clients/python'}[enrich]"]
    subprocess.run(install, check=True, timeout=240)
    asked = subprocess.run(
        [python, "-c", PROGRAM, server.target], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert asked.stdout == "(3, 28) (1, 3, 3)\n(1, 3, 28)\n"


@pytest.mark.parametrize(
    "module",
    [
        "attention_serving.server.engine.run.session",
        pytest.param("attention_serving.export.parity", marks=pytest.mark.thorough),
    ],
)
def test_onnx_runtime_keeps_no_telemetry_identifier(tmp_path: Path, module: str) -> None:
    # ONNX Runtime writes one below the home folder when it is imported. CI and the variable turn that off.
    environment = {
        key: value for key, value in os.environ.items() if key not in ("CI", "ORT_DISABLE_TELEMETRY")
    }
    environment["HOME"] = str(tmp_path)
    assert run_python("-c", f"import {module}", env=environment).returncode == 0
    assert not list(tmp_path.rglob("*onnxruntime*"))
