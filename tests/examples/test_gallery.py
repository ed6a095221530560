"""The examples, run as their users run them; and what holds for all examples."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.local_server import ROOT, ServerProcess
from tests.examples.conftest import LAYER, Run

EXAMPLES = ROOT / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("name", NAMES)
def test_an_example_shows_its_usage(name: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    docstring = (EXAMPLES / f"{name}.py").read_text().split('"""')[1]
    assert f"python -m examples.{name}" in docstring
    assert f"({name}.py)" in (EXAMPLES / "README.md").read_text()
    assert run(name, "--help") == 0
    assert name in capsys.readouterr().out.splitlines()[0]


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
