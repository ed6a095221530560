"""Artifacts that were damaged at random: refused or served, without a crash, growth or harm to others."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.server.samples import ROOT

# Damages that break a recorded hash for certain; an edit of the manifest, say, may be harmless.
BREAKING = ("flip_bits", "flip_bits_of_a_graph", "truncate", "append", "remove_a_file", "nest_branches")
DEFAULT_ARTIFACTS = 100
CHAOS_ARTIFACTS = 2000
# How much more memory the process may have in use than after the first tenth of its artifacts.
MAX_GROWTH_BYTES = 64 << 20
# Loading one artifact calibrates it in less than a second; the bound tells that from a hang.
MAX_SECONDS = 60.0


@dataclass
class Run:
    """What happened to the artifacts.

    Attributes:
        results: The report of each artifact that was loaded to its end, in order.
        crashes: For each artifact that ended the process: what was announced of it, and the exit status.
    """

    results: list[dict[str, Any]] = field(default_factory=list)
    crashes: list[tuple[dict[str, Any], int]] = field(default_factory=list)

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(result["outcome"].partition(": ")[0] for result in self.results)


def load_mutated(source: Path, folder: Path, count: int) -> Run:
    """Loads that many artifacts, in a further process after each crash."""
    run, first = Run(), 0
    while first < count:
        command = [
            sys.executable,
            "-m",
            "tests.artifact.load_mutated",
            str(source),
            str(folder),
            str(first),
            str(count),
        ]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        run.results += [
            announced | result for announced, result in zip(lines[::2], lines[1::2], strict=False)
        ]
        if done.returncode == 0:
            return run
        assert len(lines) % 2, f"the process ended between two artifacts, with status {done.returncode}"
        run.crashes.append((lines[-1], done.returncode))
        first = lines[-1]["number"] + 1
    return run


def assert_sound(run: Run, count: int) -> None:
    assert run.crashes == []
    assert len(run.results) == count
    assert [result for result in run.results if not result["good"]] == []
    assert [result for result in run.results if result["leaks"]] == []
    broken = [result for result in run.results if not result["vouched"] and result["mutation"] in BREAKING]
    assert broken
    assert [result for result in broken if not result["outcome"].startswith("refused")] == []
    assert [result for result in run.results if result["seconds"] > MAX_SECONDS] == []
    resident = [result["resident"] for result in run.results]
    assert max(resident[count // 10 :]) - max(resident[: count // 10]) < MAX_GROWTH_BYTES


def test_damaged_artifacts_neither_crash_the_process_nor_touch_other_models(
    artifacts: Path, tmp_path: Path
) -> None:
    run = load_mutated(artifacts, tmp_path, DEFAULT_ARTIFACTS)
    assert_sound(run, DEFAULT_ARTIFACTS)
    assert run.outcomes["refused"] > DEFAULT_ARTIFACTS // 2


@pytest.mark.chaos
def test_two_thousand_damaged_artifacts(artifacts: Path, tmp_path: Path) -> None:
    run = load_mutated(artifacts, tmp_path, CHAOS_ARTIFACTS)
    resident = [result["resident"] >> 20 for result in run.results]
    figures = {
        "outcomes": dict(run.outcomes),
        "slowest_seconds": max(result["seconds"] for result in run.results),
        "resident_mib": (resident[len(resident) // 10], resident[-1]),
        "crashes": run.crashes,
    }
    sys.stdout.write(json.dumps(figures) + "\n")
    assert_sound(run, CHAOS_ARTIFACTS)
