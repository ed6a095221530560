from pathlib import Path

import pytest

from benchmarks import report, tables
from benchmarks.grid import FULL, QUICK
from benchmarks.histogram import Percentiles
from benchmarks.results import (
    BULK,
    EAGER,
    FILE,
    MEMORY_FILE,
    ONNX,
    SERVICE,
    STREAM,
    TRITON,
    TYPED,
    Environment,
    Memory,
    MemorySample,
    OpenLoopMeasurement,
    Results,
    load_memory,
    load_results,
    save,
)
from benchmarks.workload import Kind
from tests.benchmarks.measurements import measurement

ENVIRONMENT = Environment(
    date="2026-01-02 03:04 UTC",
    seconds=1234.0,
    machine={"processor": "Some CPU", "cores": "2 of 2"},
    versions={"python": "3.11"},
    settings={"server options": "defaults"},
    absent=("TorchServe",),
)


def results() -> Results:
    """Every cell of the quick plan; TorchServe is absent."""
    grid = []
    for cell in [cell for model in QUICK.models for cell in QUICK.cells(model)]:
        systems = (ONNX, BULK, TRITON) if cell.bulk > 1 else (ONNX, EAGER, SERVICE, TYPED, STREAM, TRITON)
        grid += [measurement(cell, name, at, rate=100.0 + at) for name in systems for at in range(3)]
    growth = [measurement(cell, SERVICE) for model in QUICK.models for cell in QUICK.growth_cells(model)]
    percentiles = Percentiles(500, 100.0, 200.0, 300.0, None)
    open_loop = OpenLoopMeasurement(QUICK.open_cells[0], SERVICE, 0.5, 50.0, 0, percentiles)
    return Results(ENVIRONMENT, tuple(grid), tuple(growth), (open_loop,), ("Triton did not answer",))


def soak() -> Memory:
    return Memory(
        "2026-01-02 03:04 UTC",
        "mixed",
        600.0,
        1000,
        tuple(MemorySample(float(at), 1 << 28) for at in range(600)),
    )


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    save(results(), tmp_path / FILE)
    save(soak(), tmp_path / MEMORY_FILE)

    assert load_results(tmp_path) == results()
    assert load_memory(tmp_path) == soak()


def test_a_report_states_machine_targets_and_what_is_missing(tmp_path: Path) -> None:
    save(results(), tmp_path / FILE)
    save(soak(), tmp_path / MEMORY_FILE)
    text = report.write(tmp_path).read_text()

    for stated in (
        "Some CPU",
        "2026-01-02 03:04 UTC",
        "1,234 s",
        "absent peers: TorchServe",
        "Python backend",
    ):
        assert stated in text
    assert "Triton did not answer" in text
    assert "256 MiB after one minute, 256 MiB after 10 minutes" in text
    assert text.count("not measured") == 4  # two targets need the echo, two TorchServe; both are absent
    drawn = [name for name in text.split("](") if ".png)" in name]
    assert len(drawn) == 5
    assert all((tmp_path / name.split(")")[0]).stat().st_size > 1_000 for name in drawn)


def test_a_report_without_a_soak_says_so(tmp_path: Path) -> None:
    save(results(), tmp_path / FILE)

    assert "Not measured in this run." in report.write(tmp_path).read_text()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0512, "0.05"),
        (1.236, "1.24"),
        (12.34, "12.3"),
        (1234.5, "1,230"),
        (99_960.0, "100,000"),
    ],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert tables.number(value) == text


def test_the_full_grid_is_the_one_promised() -> None:
    cells = [cell for model in FULL.models for cell in FULL.cells(model) if cell.bulk == 1]

    assert len(cells) == len(set(cells)) == 2 * 3 * 4 * 3
    assert {cell.model.kind for cell in cells} == set(Kind)
    assert {cell.in_flight for cell in cells} == {1, 8, 32}
    assert {cell.lengths.name for cell in cells} == {"6", "128", "512", "mixed 1-512"}
    assert (FULL.growth[0], FULL.growth[-1]) == (64, 8192)
    assert FULL.rounds >= 3
