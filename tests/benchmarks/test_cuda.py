"""The kit for a GPU, on the CPU with few models."""

from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from attention_serving.server.engine.run.provider import Provider
from benchmarks.cuda.answers import SETUPS, verdict
from benchmarks.cuda.kit import STEPS, Result, goals
from benchmarks.cuda.pack import PART_BYTES, split
from benchmarks.cuda.proof import count_kernels
from benchmarks.cuda.settings import Row, Settings
from tests.support.processes import run_python

SETTINGS = Settings(Path(), Provider.CUDA, quick=False)


def rows(report: str, title: str) -> list[list[str]]:
    """The cells of a table of the report, without its header."""
    section = report.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_every_step_runs_on_the_cpu_and_wrong_answers_are_counted(tmp_path: Path) -> None:
    program = ("-m", "benchmarks", "cuda", "--device=cpu", "--quick", f"--cache={tmp_path}")
    ended = run_python(*program, timeout=800)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = (tmp_path / "report.md").read_text()
    assert rows(report, "Goals")[0][1].startswith("reached (0 wrong of ")
    assert "## Steps that did not end\n\nNone." in report
    counts = {name: cells for name, *cells in rows(report, "Answers by set-up")}
    assert counts.keys() == SETUPS.keys()
    for name, (runs, wrong, failed, *_) in counts.items():
        expected = ("not on this device", "-", "-") if SETUPS[name].needs_cuda else ("400", "0", "0")
        assert (runs, wrong, failed) == expected
    # The host has no kernels for bf16.
    verdicts = {(name, precision): verdict for name, precision, verdict, *_ in rows(report, "Proof")}
    assert verdicts == {
        **{(name, precision): "holds" for name, precision in verdicts if precision != "bf16"},
        **{(name, "bf16"): "not on this device" for name in ("multi-head-64x4", "causal-cross-64x4")},
    }
    for title in ("Kernels", "Encoders in process", "Attention in process", "Server"):
        assert rows(report, title), title

    # An answer that differs from its fixed one is counted.
    file = tmp_path / "fixed/multi-head-64x4-fp32.safetensors"
    cases = load_file(file)
    name = next(name for name in cases if name.endswith("/outputs/context_vectors"))
    cases[name].flat[0] += 1
    save_file(cases, file)
    ended = run_python(*program, "--only=answers-as-shipped", timeout=300)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert f"multi-head-64x4-fp32 {name.partition('/')[0]}, context_vectors" in ended.stdout
    report = (tmp_path / "report.md").read_text()
    assert rows(report, "Goals")[0][1] == "not measured"  # the server was not asked
    ((_, runs, wrong, failed, *_),) = rows(report, "Answers by set-up")
    assert (runs, failed) == ("400", "0")
    assert int(wrong) > 0
    # It is there now, and is not run again.
    ended = run_python(*program, "--only=answers-as-shipped", timeout=300)
    assert ended.returncode == 1
    assert "answers-as-shipped: there" in ended.stdout


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({}, "nothing to decide"),
        (dict.fromkeys(SETUPS, 1) | {"one thread": 0, "as shipped": 0},
         "end without runs at a time, which the lock prevents"),
        ({"four threads": 2, "own sessions": 1, "as shipped": 1}, "end without the shared arena; or without"),
        (dict.fromkeys(SETUPS, 1) | {"one thread": 0}, "nothing ends"),
        ({"one thread": 1}, "neither a lock nor arenas"),
    ],
)  # fmt: skip
def test_the_verdict_names_what_ends_wrong_values(wrong: dict[str, int], expected: str) -> None:
    assert expected in verdict([{"set-up": name, "wrong": wrong.get(name, 0)} for name in SETUPS])


def test_goals_are_judged_by_the_figures_of_the_steps() -> None:
    sizes = {"sequences/s": 900.0, "of echo": 0.9, "set-up": "1 worker"}
    rows: dict[str, list[Row]] = {
        "answers-as-shipped": [{"set-up": "as shipped", "runs": 12_500, "wrong": 0, "failed": 0}],
        "served-answers": [{"runs": 500, "wrong": 1, "failed": 0}],
        "encoders-small": [
            {"encoder": "minilm-encoder, fp16", "texts": size, "tokens": 128, "texts/s": 1000.0, "ratio": 1.3}
            for size in (32, 256)
        ],
        "server-1-worker": [
            {**sizes, "request": "32 texts"},
            {**sizes, "request": "256 texts", "sequences/s": 700.0},
            {**sizes, "request": "256 x 128 x 768"},
        ],
    }
    verdicts = goals(SETTINGS, {name: Result("", found) for name, found in rows.items()})
    assert [verdict for _, verdict in verdicts] == [
        "missed (1 wrong of 13,000)", "reached (1.3)", "not measured", "missed (0.7)", "reached (0.9)",
        "missed (0.302)",
    ]  # fmt: skip
    assert all("not measured" in verdict for _, verdict in goals(SETTINGS, {}))


def test_the_limits_of_all_steps_are_below_ten_minutes() -> None:
    assert sum(step.seconds for step in STEPS.values()) < 600


def test_kernels_are_read_from_the_log() -> None:
    lines = [
        "ONNX Attention: using Flash Attention (batch=1, q_seq=7, total_seq=7, past=no)",
        "ONNX Attention: using Memory Efficient Attention (batch=1, q_seq=7, total_seq=8, past=no, mask=yes)",
        "Attention: using unified unfused path (is_gqa=0, head_size=16, softcap=0)",
    ]
    assert count_kernels([*lines, lines[0], "other"]) == {"FLASH": 2, "MEMORY_EFFICIENT": 1, "UNFUSED": 1}


def test_parts_are_small_and_join_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PART_BYTES < 64 << 20
    monkeypatch.setattr("benchmarks.cuda.pack.PART_BYTES", 1000)
    content = bytes(range(256)) * 9
    (tmp_path / "file").write_bytes(content)
    parts = list(split(tmp_path / "file", tmp_path / "part"))
    assert [part.name for part in parts] == ["part.00", "part.01", "part.02"]
    assert b"".join(part.read_bytes() for part in parts) == content
