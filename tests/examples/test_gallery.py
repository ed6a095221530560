"""The examples, run as their users run them; and what holds for all examples."""

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from attention_client import AttentionClient
from torch.onnx._internal.exporter._registration import ONNXRegistry

from examples import bring_your_bert
from scripts.local_server import ROOT, ServerProcess
from tests.encoders.repository import SENTENCE
from tests.examples.conftest import LAYER, Run
from tests.server.http.clients import http_port
from tests.server.samples import CROSS

EXAMPLES = ROOT / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.name != "__init__.py")
# Packages that examples need and the project does not install.
NEEDED = {"langchain_embeddings": "langchain_openai", "llama_index_embeddings": "llama_index"}


@pytest.mark.parametrize("name", NAMES)
def test_an_example_shows_its_usage(name: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    docstring = (EXAMPLES / f"{name}.py").read_text().split('"""')[1]
    assert f"python -m examples.{name}" in docstring
    assert f"({name}.py)" in (EXAMPLES / "README.md").read_text()
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    assert run(name, "--help") == 0
    assert name in capsys.readouterr().out.splitlines()[0]


@pytest.mark.thorough
def test_bring_your_bert(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # PyTorch's exporter would read its operators again for each graph.
    monkeypatch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
    folder = bring_your_bert.make_tiny_bert(tmp_path / "bert")
    assert run("bring_your_bert", folder, "--name=mine", "--out", tmp_path / "models") == 0
    printed = capsys.readouterr().out
    assert f"exported to {tmp_path}/models/mine/1" in printed
    differences = [float(number) for number in re.findall(r"largest difference .*: (\S+)", printed)]
    assert len(differences) == 2
    assert max(differences) < 1e-5


@pytest.mark.thorough
def test_replace_a_layer(
    example_server: ServerProcess,
    tmp_path: Path,
    run: Run,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert run("replace_a_layer", "save", tmp_path / "layer.safetensors") == 0
    assert run("replace_a_layer", "run", example_server.target, LAYER) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("largest difference from the local encoder: ")
    assert float(printed.split()[-1]) < 1e-5
    assert not caplog.records  # the fallback would warn


def test_stored_context(example_server: ServerProcess, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    given = f"--server {example_server.target} --model {CROSS} --rows 50 --questions 20 --plain 3"
    assert run("stored_context", *given.split()) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^with a context of 50 rows: [\d,]+ questions/s\nratio: [\d.]+$", printed, re.MULTILINE)
    assert float(printed.split()[-1]) < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("name", NEEDED)
def test_clients_of_openai(
    name: str, example_server: ServerProcess, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """What LangChain and LlamaIndex find is what the vectors of the server say."""
    pytest.importorskip(NEEDED[name])
    question, where = "What is sweet?", f"--url=http://127.0.0.1:{http_port(example_server.log)}/v1"
    assert run(name, question, where, "--model", SENTENCE) == 0
    lines = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines()]
    found = {text: float(score) for score, text in lines}
    with AttentionClient(example_server.target) as client:
        scores = client.embed(SENTENCE, list(found)) @ client.embed(SENTENCE, question)
    assert len(found) == 3
    assert list(found.values()) == pytest.approx(sorted(scores.tolist(), reverse=True), abs=1e-3)


@pytest.mark.thorough
def test_a_project_with_a_model_of_its_own_exports_and_serves_it(tmp_path: Path) -> None:
    """A project outside the checkout, with files named as the folders here."""
    project = shutil.copytree(EXAMPLES / "own_module", tmp_path / "project")
    for name in ("artifact", "export", "protos", "server"):
        (project / f"{name}.py").write_text("raise ImportError('a module of the project')")
    installed = tmp_path / "installed"  # holds attention_serving alone, as an installation does
    installed.mkdir()
    (installed / "attention_serving").symlink_to(ROOT / "attention_serving")
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "main.py"]
    assert subprocess.check_output(command, cwd=project, env=environment, text=True).startswith("3 answers; ")
