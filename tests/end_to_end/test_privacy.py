"""ONNX Runtime writes no telemetry identifier."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.local_server import ROOT


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
    subprocess.run([sys.executable, "-c", f"import {module}"], cwd=ROOT, env=environment, check=True)
    assert not list(tmp_path.rglob("*onnxruntime*"))
