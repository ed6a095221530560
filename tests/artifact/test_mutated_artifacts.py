"""Artifacts that were damaged at random: refused or served, without a crash, growth or harm to others."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.local_server import ROOT

# Damages that break a recorded hash for certain; an edit of the manifest, say, may be harmless.
BREAKING = ("truncate", "nest_branches")
ARTIFACTS = 100
# How much more memory the process may have in use than after the first tenth of its artifacts.
MAX_GROWTH_BYTES = 64 << 20
# Loading one artifact calibrates it in less than a second; the bound tells that from a hang.
MAX_SECONDS = 60.0


@pytest.mark.thorough
def test_damaged_artifacts_neither_crash_the_process_nor_touch_other_models(
    artifacts: Path, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.artifact.load_mutated",
        str(artifacts),
        str(tmp_path),
        str(ARTIFACTS),
    ]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, lines[-1]  # what was announced of the artifact that ended the process
    results = [announced | result for announced, result in zip(lines[::2], lines[1::2], strict=True)]
    assert len(results) == ARTIFACTS
    assert [each for each in results if not each["good"] or each["leaks"]] == []
    assert [each for each in results if each["seconds"] > MAX_SECONDS] == []
    broken = [each for each in results if not each["vouched"] and each["mutation"] in BREAKING]
    refused = [each for each in results if each["outcome"].startswith("refused")]
    assert broken
    assert [each for each in broken if each not in refused] == []
    assert len(refused) > ARTIFACTS // 2
    resident = [each["resident"] for each in results]
    assert max(resident[ARTIFACTS // 10 :]) - max(resident[: ARTIFACTS // 10]) < MAX_GROWTH_BYTES
