"""The parts of the program for a GPU that need none: logs, sizes, findings, and the report."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import onnxruntime
import pytest

from benchmarks.cuda.__main__ import MODULES
from benchmarks.cuda.plan import FULL, MOST_ROWS, QUICK, STEPS, Plan, Record, Run
from benchmarks.cuda.proof import chosen_kernels
from benchmarks.cuda.report import ONNX_DEVICE, ONNX_HOST, TORCH_DEVICE, Outcome, targets, write
from tests.test_structure import ROOT

# Lines as ONNX Runtime's sources write them (core/providers/cuda/llm/attention.cc, AttentionKernelDebugInfo),
# not recorded on a GPU.
PREFIX = "2026-11-22 10:00:00.000000000 [V:onnxruntime:Default, attention.cc:1400]"
LOG = f"""\
{PREFIX} ONNX Attention: using Flash Attention (batch=2, q_seq=128, total_seq=128, past=no)
{PREFIX} ONNX Attention: using Memory Efficient Attention (batch=2, q_seq=128, past=no, mask=yes)
{PREFIX} Attention: using unified unfused path (is_gqa=0, head_size=64, softcap=0)
Operator=Attention Node=node_Attention_1 DataType=fp16 SdpaKernel=CUDNN_FLASH_ATTENTION
Operator=Attention Node=node_Attention_1 DataType=fp16 SdpaKernel=XQA
{PREFIX} Both nonpad_kv_seqlen and attn_mask provided. Flash Attention does not support this combination
"""


def test_kernels_are_read_from_the_log() -> None:
    assert chosen_kernels(LOG) == Counter(
        {"flash": 1, "memory-efficient": 1, "unfused": 1, "cuDNN": 1, "XQA": 1}
    )
    assert not chosen_kernels("Attention without a decision")


@pytest.mark.parametrize("plan", [FULL, QUICK], ids=["full", "quick"])
def test_cells_are_bounded_and_in_order(plan: Plan) -> None:
    rows = [batch * length for batch, length in plan.cells()]
    assert rows == sorted(rows)
    assert rows[-1] <= MOST_ROWS


def test_the_full_extent_has_the_sizes_of_the_targets() -> None:
    assert (min(FULL.lengths), max(FULL.lengths)) == (6, 8192)
    assert (min(FULL.batches), max(FULL.batches)) == (1, 256)
    assert {(256, 128), (1, 8192)} <= set(FULL.cells())
    assert (2, 256, 128) in FULL.loads


def test_every_step_has_a_function() -> None:
    assert set(STEPS) == set(MODULES) - {"check"}


def test_a_finding_that_was_cut_off_does_not_hide_the_others(run: Run) -> None:
    assert run.found("proof") == []
    run.add("proof", model="a", error=0.5)
    with (run.work / "proof.jsonl").open("a") as file:
        file.write('{"model": "b", "err')
    assert run.found("proof") == [{"model": "a", "error": 0.5}]


HOST = {"shapes": ["Shape a", "Shape b", "Gather c"], "tensors": ["Cos d"]}


def proven(*, holds: bool = True, precision: str = "fp32") -> Record:
    return {
        "module": "m",
        "precision": precision,
        "graph": "plain",
        "cases": 9,
        "error": 2e-6,
        "holds": holds,
        "host": HOST,
    }


def timed(system: str, seconds: float, *, precision: str = "fp16", batch: int = 1, length: int = 6) -> Record:
    cell = {"precision": precision, "batch": batch, "length": length, "system": system}
    return {**cell, "median": seconds, "shortest": seconds, "calls": 9}


EMPTY: dict[str, list[Record]] = {step: [] for step in STEPS}


def test_targets_without_findings_are_not_measured() -> None:
    assert [row[3] for row in targets(EMPTY)] == ["not measured"] * 4


@pytest.mark.parametrize(("factor", "verdict"), [(2.0, "met"), (0.5, "missed")])
def test_targets_are_ratios_of_what_was_measured(factor: float, verdict: str) -> None:
    large = [timed(ONNX_HOST, 1.0, precision=p, batch=256, length=128) for p in ("fp32", "fp16")]
    found = EMPTY | {
        "proof": [proven(), proven(holds=factor > 1)],
        "onnx": [*large, timed(ONNX_DEVICE, 1.0)],
        "torch": [timed(TORCH_DEVICE, factor)],
        "service": [
            {"precision": p, "per_request": 256, "length": 128, "rate": 256 * factor}
            for p in ("fp32", "fp16")
        ],
    }
    assert [row[3] for row in targets(found)] == [verdict] * 4


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run("cpu", quick=True, work=tmp_path / "work", models=tmp_path / "models")
    run.forget()
    return run


def test_a_failed_step_leaves_the_findings_of_the_others(run: Run, tmp_path: Path) -> None:
    run.add("proof", **proven())
    run.add("proof", module="m", precision="bf16", graph="", holds=False, problem="no kernel")
    run.add("onnx", precision="fp32", batch=8, length=6, problem="out of memory")
    outcomes = [Outcome(step, 1.0, "not ended after 1 s" if step == "onnx" else "") for step in STEPS]
    text = write(run, outcomes, tmp_path / "report").read_text()
    assert "| m | fp32 | 9 | 2e-06 | holds | Cos 1 | Gather 1, Shape 2 |" in text
    assert "| m | bf16 | 0 | 0 | MISSED: no kernel | none | none |" in text
    assert "| onnx | 1 | not ended after 1 s |" in text
    assert "- onnx, fp32 8 6: out of memory" in text
    assert "no GPU took part" in text
    assert "## Through the server" not in text


@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this runtime has CUDA"
)
def test_without_a_gpu_the_program_ends_with_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.cuda", f"--work={tmp_path}", f"--out={tmp_path / 'report'}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: no GPU to measure: onnxruntime ")
    assert "install onnxruntime-gpu in its place" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not (tmp_path / "report").exists()
