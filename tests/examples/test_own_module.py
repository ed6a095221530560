"""A project outside the checkout, with a model.py of its own, and with files named as the folders here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.local_server import ROOT
from tests.examples.running import EXAMPLES


def test_a_project_with_a_model_of_its_own_exports_and_serves_it(tmp_path: Path) -> None:
    project = shutil.copytree(EXAMPLES / "own_module", tmp_path / "project")
    for name in ("artifact", "export", "protos", "server"):
        (project / f"{name}.py").write_text("raise ImportError('a module of the project')")
    installed = tmp_path / "installed"  # holds attention_serving alone, as an installation does
    installed.mkdir()
    (installed / "attention_serving").symlink_to(ROOT / "attention_serving")
    done = subprocess.run(
        [sys.executable, "main.py"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 answers; ")
