"""The program for a GPU, on the CPU with few models."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cuda.plan import CAUSAL_CROSS, QUICK, Record, Run
from scripts.local_server import ROOT

GRAPHS = {"plain", "lengths", "mask", "weights", "blocks", "mask_blocks"}
# Two busy cores take longer than a machine with a GPU: each step may take more than its usual time.
MINUTES = 60


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_every_step_runs_on_the_cpu(tmp_path: Path) -> None:
    options = ("--device=cpu", "--quick", f"--work={tmp_path}", f"--minutes={MINUTES}")
    command = [sys.executable, "-m", "benchmarks.cuda", *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = Run("cpu", quick=True, work=tmp_path, models=tmp_path)
    assert {one["model"] for one in run.found("export")} == {case.name for case in run.cases()}

    proofs = run.found("proof")
    assert {one["module"] for one in proofs} == set(QUICK.models)
    for precision in ("fp32", "fp16"):
        own = [one for one in proofs if one["precision"] == precision]
        assert {one["graph"] for one in own} == GRAPHS
        assert all(one["holds"] and one["cases"] > 0 for one in own)
        assert any(one["module"] == CAUSAL_CROSS for one in own)
    # The host has no kernels for bf16.
    assert not any(one["holds"] for one in proofs if one["precision"] == "bf16")

    def in_fp32(step: str) -> list[Record]:
        return [one for one in run.found(step) if one["precision"] == "fp32"]

    for step in ("onnx", "torch"):
        assert len([one for one in in_fp32(step) if one["median"] > 0]) == len(QUICK.cells())
    assert [(one["in_flight"], one["per_request"], one["length"]) for one in in_fp32("service")] == [
        *QUICK.loads
    ]
    assert all(one["holds"] and one["rate"] > 0 and not one["failures"] for one in in_fp32("service"))
    assert "## Through the server" in (tmp_path / "report/report.md").read_text()
