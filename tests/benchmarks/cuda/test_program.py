"""The whole program for a GPU, on the CPU with few models: every step, and the report."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attention_serving.export.artifact import write_artifact
from attention_serving.export.model_id import ModelId
from attention_serving.export.precision import Precision
from benchmarks.cuda import plan
from benchmarks.cuda.plan import CAUSAL_CROSS, QUICK, STEPS, Record, Run, build
from tests.support.artifacts import ModelSet, cached_repositories, link_tree
from tests.test_structure import ROOT

pytestmark = pytest.mark.timeout(900)
# Two busy cores take longer than a machine with a GPU: each step may take more than its usual time.
MINUTES = 60
# The program exports this one itself.
MISSING = "causal-self-attention"


def export_models(folder: Path) -> None:
    for case in Run("cpu", quick=True, work=folder, models=folder).cases():
        precision = Precision(case.precision)
        write_artifact(build(case.module), ModelId(case.name), folder, precision=precision)


def found(work: Path, step: str) -> list[Record]:
    return Run("cpu", quick=True, work=work, models=work).found(step)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda")
    (exported,) = cached_repositories(ModelSet("cuda", [export_models], [Path(plan.__file__)]))
    for model in exported.iterdir():
        if model.name != MISSING:
            link_tree(model, folder / "models" / model.name)
    options = ["--device=cpu", "--quick", f"--work={folder}", f"--minutes={MINUTES}"]
    command = [sys.executable, "-m", "benchmarks.cuda", *options]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=dict(os.environ), timeout=800, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [line.split(":")[0] for line in ended.stdout.splitlines()[:-1]] == [*STEPS]
    return folder


def test_fp32_and_fp16_hold_for_every_graph_and_bf16_is_refused_by_the_host(work: Path) -> None:
    all_found = found(work, "proof")
    assert {one["module"] for one in all_found} == set(QUICK.models)
    for precision in ("fp32", "fp16"):
        own = [one for one in all_found if one["precision"] == precision]
        assert {"plain", "lengths", "mask", "weights", "blocks", "mask_blocks"} == {
            one["graph"] for one in own
        }
        assert all(one["holds"] and one["cases"] > 0 for one in own)
    assert not any(one["holds"] for one in all_found if one["precision"] == "bf16")


def test_causal_attention_over_keys_of_another_length_is_among_the_proofs(work: Path) -> None:
    own = [one for one in found(work, "proof") if one["module"] == CAUSAL_CROSS]
    assert {one["precision"] for one in own if one["holds"]} == {"fp32", "fp16"}


def test_what_the_repository_lacks_is_exported(work: Path) -> None:
    assert [one["model"] for one in found(work, "export")] == [MISSING]


def test_both_libraries_are_measured_in_every_cell(work: Path) -> None:
    for step, systems in (("onnx", 2), ("torch", 2)):
        own = [one for one in found(work, step) if one["precision"] == "fp32"]
        assert len(own) == systems * len(QUICK.cells())
        assert all(one["median"] > 0 for one in own)


def test_the_server_answers_every_load_right(work: Path) -> None:
    own = [one for one in found(work, "service") if one["precision"] == "fp32"]
    assert [(one["in_flight"], one["per_request"], one["length"]) for one in own] == [*QUICK.loads]
    assert all(one["holds"] and one["rate"] > 0 and not one["failures"] for one in own)


def test_costs_are_recorded(work: Path) -> None:
    own = [one for one in found(work, "costs") if one["precision"] == "fp32"]
    assert {one["graph"] for one in own} >= {"plain", "lengths"}


def test_the_report_says_that_no_gpu_took_part(work: Path) -> None:
    text = (work / "report/report.md").read_text()
    assert text.startswith("# The service on the CPU\n")
    assert "no GPU took part, and nothing here says anything about one" in text
    for title in ("Steps", "Targets", "Proof", "Sequences per second, in process", "Through the server"):
        assert f"## {title}" in text
