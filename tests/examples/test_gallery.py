"""The examples that embed texts, run as their users run them; and what holds for all examples."""

import re
from functools import cache
from pathlib import Path

import pytest
from torch.onnx._internal.exporter._registration import ONNXRegistry

from attention_serving.model.checkpoints.loading import load_checkpoint
from examples import bring_your_bert
from scripts.local_server import ServerProcess
from tests.examples.models import LAYER
from tests.examples.running import EXAMPLES, run, scripts

# Packages that examples need and the project does not install.
NEEDED = {"langchain_embeddings": "langchain_openai", "llama_index_embeddings": "llama_index"}


@pytest.mark.parametrize("name", [path.stem for path in scripts()])
def test_an_example_shows_its_usage(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    assert run(name, "--help") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: ")
    assert name in printed.splitlines()[0]


@pytest.mark.parametrize("name", [path.stem for path in scripts()])
def test_the_docstring_shows_the_command(name: str) -> None:
    assert f"python -m examples.{name}" in (EXAMPLES / f"{name}.py").read_text().split('"""')[1]


def test_the_index_lists_every_example() -> None:
    linked = set(re.findall(r"\]\(([\w./]+)\)", (EXAMPLES / "README.md").read_text()))
    assert {path.name for path in scripts()} | {"typescript/"} <= linked


def test_bring_your_bert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # PyTorch's exporter would read its operators again for each graph.
    monkeypatch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
    folder, again = (bring_your_bert.make_tiny_bert(tmp_path / name) for name in ("bert", "again"))
    for path in folder.iterdir():  # so that a second run finds the same model
        assert path.read_bytes() == (again / path.name).read_bytes()
    assert run("bring_your_bert", folder, "--name=mine", "--out", tmp_path / "models") == 0
    printed = capsys.readouterr().out
    assert f"exported to {tmp_path}/models/mine/1" in printed
    differences = [float(number) for number in re.findall(r"largest difference .*: (\S+)", printed)]
    assert len(differences) == 2
    assert max(differences) < 1e-5
    assert run("bring_your_bert", tmp_path, "--out", tmp_path / "models") == 1
    assert "config.json cannot be read" in capsys.readouterr().err


def test_replace_a_layer(
    example_server: ServerProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights = tmp_path / "layer.safetensors"
    assert run("replace_a_layer", "save", weights) == 0
    assert load_checkpoint(weights, layout="torch", heads=4).skipped == ()
    assert run("replace_a_layer", "run", example_server.target, LAYER) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("largest difference from the local encoder: ")
    assert float(printed.split()[-1]) < 1e-5
    assert not caplog.records  # the fallback would warn
