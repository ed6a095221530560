"""What the programs import, write and need: the client alone, one name for each module, no telemetry."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from scripts.local_server import ROOT, ServerProcess, serving
from tests.test_structure import PARTS

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
IMPORTED = re.compile(r"^import time:.*\| +([\w.]+)$", re.MULTILINE)


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
    freeze = [*pip, "list", "--format=freeze"]
    installed = subprocess.run(freeze, capture_output=True, text=True, check=True).stdout
    assert "attention-client==" in installed
    assert "torch" not in installed
    assert "onnx" not in installed


def named_otherwise(log: str) -> set[str]:
    """The modules of this project that a process with `-X importtime` did not load from attention_serving."""
    return {name for name in IMPORTED.findall(log) if name.split(".")[0] in PARTS | {"clients"}}


@pytest.mark.thorough
@pytest.mark.parametrize("module", ["server", "attention_serving.server"])
def test_a_server_and_its_processes_load_each_module_under_one_name(
    module: str, artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.local_server.MODULE", module)
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # of the workers and of the HTTP process too
    log = tmp_path / "log"
    with serving(artifacts, log, "--workers=2", "--http-port=0") as server:
        server.stop()
    text = log.read_text()
    assert "attention_serving.server.engine.run.session" in text
    # Python imports the package of a module that it runs.
    assert named_otherwise(text) == ({"server"} if module == "server" else set())


@pytest.mark.thorough
def test_a_command_loads_each_module_under_one_name() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "clients.enrich", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert named_otherwise(done.stderr) == {"clients", "clients.enrich"}


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
