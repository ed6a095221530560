"""docs/parity.md: its commands run, and it states the tolerances and the default of the code."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from attention_serving.export.precision import TOLERANCES, Precision
from attention_serving.server.settings.sections import Models
from scripts.local_server import ROOT

PAGE = (ROOT / "docs/parity.md").read_text()
PYTHON = ".venv/bin/python"


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_the_commands_run_in_their_order(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    ran = []
    for line in commands():
        if "-m server " in line:  # in tests/server/engine/models/test_certificates.py
            continue
        command = [sys.executable if word == PYTHON else word for word in shlex.split(line)]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, (line, done.stderr)
        ran.append(done.stdout)
    key = re.search(r"signed with key ([0-9a-f]{64})", ran[-1])
    assert key is not None
    (shown,) = re.findall(r"`(openssl pkey [^`]*sha256sum)`", PAGE)
    digest = subprocess.run(shown, cwd=tmp_path, shell=True, capture_output=True, text=True, check=True)  # noqa: S602 - the page's own command
    assert digest.stdout.split()[0] == key[1]


@pytest.mark.parametrize("precision", Precision)
def test_the_page_states_each_tolerance(precision: Precision) -> None:
    (row,) = [line.split("|") for line in PAGE.splitlines() if line.startswith(f"| {precision} |")]
    assert (float(row[2]), float(row[3])) == (TOLERANCES[precision].rtol, TOLERANCES[precision].atol)


def test_the_page_states_the_default_period() -> None:
    default = Models.model_fields["canary_seconds"].default
    assert f"`--canary-seconds` ({default:g}) is the time" in PAGE
