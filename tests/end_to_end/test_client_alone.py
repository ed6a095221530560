"""attention_client installs alone, and works in an environment that holds nothing else."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from scripts.local_server import ROOT, ServerProcess

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
print(sorted({"torch", "onnxruntime", "onnx"} & set(sys.modules)))
"""


@pytest.mark.thorough
def test_in_an_empty_environment(server: ServerProcess, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    python = str(tmp_path / "venv/bin/python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    install = [*pip, "install", "--quiet", "--no-compile", f"{ROOT / 'clients/python'}[enrich]"]
    subprocess.run(install, check=True, timeout=240)
    asked = subprocess.run(
        [python, "-c", PROGRAM, server.target], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert asked.stdout == "(3, 28) (1, 3, 3)\n(1, 3, 28)\n[]\n"
    freeze = [*pip, "list", "--format=freeze"]
    installed = subprocess.run(freeze, capture_output=True, text=True, check=True).stdout
    assert "attention-client==" in installed
    assert "torch" not in installed
    assert "onnx" not in installed


def test_imports_beside_tritonclient_in_either_order() -> None:
    for modules in ("attention_client, tritonclient.grpc", "tritonclient.grpc, attention_client"):
        subprocess.run([sys.executable, "-c", f"import {modules}"], check=True, timeout=60)
