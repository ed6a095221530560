"""The commands of a checkout, such as `python -m server`, load each module under one name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.local_server import ROOT, serving
from tests.test_structure import PARTS

pytestmark = pytest.mark.thorough
IMPORTED = re.compile(r"^import time:.*\| +([\w.]+)$", re.MULTILINE)


def named_otherwise(log: str) -> set[str]:
    """The modules of this project that a process with `-X importtime` did not load from attention_serving."""
    return {name for name in IMPORTED.findall(log) if name.split(".")[0] in PARTS | {"clients"}}


@pytest.mark.parametrize("module", ["server", "attention_serving.server"])
def test_a_server_and_its_processes(
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


def test_a_command() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "clients.enrich", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert named_otherwise(done.stderr) == {"clients", "clients.enrich"}
