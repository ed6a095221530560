"""The examples, run as their users run them; and what holds for all examples."""

import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch.nn.functional as F
from attention_client import AttentionClient

from examples import late_interaction, rag_late_chunking, replace_a_layer, stored_context
from scripts.local_server import ROOT, ServerProcess
from tests.encoders.repository import SENTENCE
from tests.encoders.texts import expected_of
from tests.examples.conftest import LAYER
from tests.server.samples import CROSS

EXAMPLES = ROOT / "examples"
# Packages that examples need and the project does not install.
NEEDED = {"langchain_embeddings": "langchain_openai", "llama_index_embeddings": "llama_index"}
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("name", NAMES)
def test_an_example_shows_its_usage(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(NEEDED.get(name, "attention_client"))
    example = import_module(f"examples.{name}")
    assert f"python -m examples.{name}" in str(example.__doc__)
    assert f"({name}.py)" in (EXAMPLES / "README.md").read_text()
    with pytest.raises(SystemExit, match="0"):
        example.main(["--help"])
    assert capsys.readouterr().out.startswith("usage:")


@pytest.mark.thorough
def test_replace_a_layer(
    example_server: ServerProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert replace_a_layer.main(["save", str(tmp_path / "layer.safetensors")]) == 0
    assert replace_a_layer.main(["run", example_server.target, LAYER]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("largest difference from the local encoder: ")
    assert float(printed.split()[-1]) < 1e-5
    assert not caplog.records  # the fallback would warn


def test_stored_context(example_server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    given = f"--server {example_server.target} --model {CROSS} --rows 50 --questions 20 --plain 3"
    assert stored_context.main(given.split()) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^with a context of 50 rows: [\d,]+ questions/s\nratio: [\d.]+$", printed, re.MULTILINE)
    assert float(printed.split()[-1]) < 1e-5


def test_late_interaction_equals_the_library(
    example_server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    query, texts = "What is sweet?", ["Cakes are.", "a", "Lemons are not, nor is salt."]
    assert late_interaction.main([query, *texts, "--server", example_server.target, "--model", SENTENCE]) == 0
    lines = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines()]
    vectors = {text: F.normalize(expected_of("bert", text).tokens, dim=1) for text in (query, *texts)}
    scores = {text: (vectors[query] @ vectors[text].T).amax(dim=1).sum().item() for text in texts}
    assert [text for _, text in lines] == sorted(texts, key=lambda text: -scores[text])
    assert [float(score) for score, _ in lines] == pytest.approx(sorted(scores.values())[::-1], abs=2e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NEEDED)
def test_clients_of_openai(
    name: str, example_server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """What LangChain and LlamaIndex find is what the vectors of the server say."""
    pytest.importorskip(NEEDED[name])
    question, where = "What is sweet?", f"--url=http://127.0.0.1:{example_server.http_port}/v1"
    assert import_module(f"examples.{name}").main([question, where, "--model", SENTENCE]) == 0
    lines = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines()]
    found = {text: float(score) for score, text in lines}
    with AttentionClient(example_server.target) as client:
        scores = client.embed(SENTENCE, list(found)) @ client.embed(SENTENCE, question)
    assert len(found) == 3
    assert list(found.values()) == pytest.approx(sorted(scores.tolist(), reverse=True), abs=1e-3)


@pytest.mark.thorough
def test_late_chunking_prints_the_nearest_passages_first(
    example_server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text"
    passages = ["One sentence that is long enough.", "Another sentence of this text."]
    path.write_text(" ".join(passages))
    where = ["--server", example_server.target, "--model", SENTENCE]
    assert rag_late_chunking.main(["How long is it?", str(path), *where]) == 0
    scores, found = zip(*(line.split("  ", 1) for line in capsys.readouterr().out.splitlines()), strict=True)
    assert list(map(float, scores)) == sorted(map(float, scores), reverse=True)
    assert sorted(found) == sorted(f"{path}: {passage}" for passage in passages)
    assert rag_late_chunking.main(["How long is it?", str(tmp_path / "absent"), *where]) == 1


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
