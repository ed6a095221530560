"""The program for a GPU, on the CPU with few models."""

from pathlib import Path

import pytest

from tests.support.processes import run_python


def rows(report: str, title: str) -> list[list[str]]:
    """The cells of a table of the report, without its header."""
    section = report.partition(f"## {title}")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_every_step_runs_on_the_cpu(tmp_path: Path) -> None:
    options = ("--device=cpu", "--quick", f"--cache={tmp_path}")
    ended = run_python("-m", "benchmarks", "cuda", *options, timeout=800)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = (tmp_path / "report.md").read_text()
    proofs = {(model, precision): own for model, precision, *own in rows(report, "Proof")}
    assert {model for model, _ in proofs} == {"multi-head-64x4", "causal-cross-64x4"}
    for (_, precision), (compared, _, verdict, _) in proofs.items():
        # The host has no kernels for bf16.
        assert ("the bf16 graph does not load" if precision == "bf16" else "holds") in verdict
        assert precision == "bf16" or int(compared) > 0
    for title in ("Sequences per second", "Median latency"):
        measured = rows(report, title)
        assert [own[0] for own in measured] == [
            f"{precision}6 x 64, {count} in flight" for precision in ("", "fp16, ") for count in (1, 8)
        ]
        assert "-" not in [cell for own in measured for cell in own]
    ((case, system, *_, requests, failed),) = rows(report, "At fixed rates")
    assert (case, system, failed) == ("6 x 64", "service", "0")
    assert int(requests.replace(",", "")) > 0
    assert "self-64x4-bf16, all cells" in report
