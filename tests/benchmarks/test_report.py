from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import report, tables
from benchmarks.results import (
    BATCH,
    EAGER,
    ENRICHMENT_FILE,
    MEMORY_FILE,
    ONNX,
    RESULTS_FILE,
    SERVICE,
    STREAM,
    TRITON,
    TRITON_CPP,
    TRITON_CPP_SINGLE,
    TYPED,
    Conditions,
    EnrichmentRates,
    MemoryCurve,
    MemorySample,
    OpenLoopMeasurement,
    Percentiles,
    Results,
    load_enrichment,
    load_memory,
    load_results,
    save,
)
from benchmarks.workload import QUICK
from tests.benchmarks.measurements import measurement

CONDITIONS = Conditions(
    date="2026-01-02 03:04 UTC",
    seconds=1234.0,
    machine={"processor": "Some CPU", "cores": "2 of 2"},
    versions={"python": "3.11"},
    settings={"server options": "defaults"},
    absent=("Triton (C++ backend)", "TorchServe"),
)
RATES = EnrichmentRates("2026-01-02 03:04 UTC", 1_000, (100.0, 110.0), (80.0, 88.0))


def results() -> Results:
    """Every cell of the quick plan, without TorchServe."""
    grid = []
    for cell in [cell for model in QUICK.models for cell in QUICK.cells(model)]:
        batch_cell = cell.per_request > 1
        systems = (ONNX, BATCH, TRITON) if batch_cell else (ONNX, EAGER, SERVICE, TYPED, STREAM, TRITON)
        grid += [measurement(cell, name, at, rate=100.0 + at) for name in systems for at in range(3)]
    growth = [measurement(cell, SERVICE) for model in QUICK.models for cell in QUICK.growth_cells(model)]
    percentiles = Percentiles(500, 100.0, 200.0, 300.0, None)
    open_loop = OpenLoopMeasurement(QUICK.open_cells[0], SERVICE, 0.5, 50.0, 0, percentiles)
    return Results(
        CONDITIONS, tuple(grid), tuple(growth), (open_loop,), (), ("Triton failed", "Triton failed")
    )


def memory_curve() -> MemoryCurve:
    samples = tuple(MemorySample(float(at), 1 << 28) for at in range(600))
    return MemoryCurve("2026-01-02 03:04 UTC", "mixed", 600.0, 1000, samples)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    save(results(), tmp_path / RESULTS_FILE)
    save(memory_curve(), tmp_path / MEMORY_FILE)
    save(RATES, tmp_path / ENRICHMENT_FILE)

    assert load_results(tmp_path) == results()
    assert load_memory(tmp_path) == memory_curve()
    assert load_enrichment(tmp_path) == RATES


def test_a_report_states_machine_targets_and_what_was_not_measured() -> None:
    text = report.render(results(), memory_curve(), RATES, [])

    for stated in (
        "Some CPU",
        "2026-01-02 03:04 UTC",
        "1,234 s",
        "peers that were not installed: Triton (C++ backend), TorchServe",
        "Triton failed (2 times)",
        "256 MiB after one minute, 256 MiB after 10 minutes",
    ):
        assert stated in text
    assert text.count("not measured |") == 9  # they need Triton's C++ backend, the echo or int8


def test_a_report_begins_with_rates_and_latencies() -> None:
    text = report.render(results(), memory_curve(), RATES, [])
    titles = [line for line in text.splitlines() if line.startswith("#")]

    assert titles[:4] == [
        "# Benchmark",
        "## Sequences per second, beside other servers",
        "## Latency",
        "## Targets",
    ]
    assert "| case | service | service, stream | Triton (Python backend) |" in text
    assert "Triton (C++ backend) was not measured in this run" in text


def test_a_report_shows_each_plot_that_was_drawn(tmp_path: Path) -> None:
    measurements, out = tmp_path / "measurements", tmp_path / "out"
    measurements.mkdir()
    out.mkdir()
    save(results(), measurements / RESULTS_FILE)
    save(memory_curve(), measurements / MEMORY_FILE)
    text = report.write(measurements, out).read_text()
    drawn = [name.split(")")[0] for name in text.split("](") if ".png)" in name]

    assert len(drawn) == 5
    assert all((out / name).stat().st_size > 1_000 for name in drawn)
    assert {path.name for path in out.iterdir()} == {*drawn, "report.md"}


def test_a_report_without_memory_and_enrichment_says_so() -> None:
    assert report.render(results(), None, None, []).count("Not measured in this run") == 2


def test_a_report_shows_the_second_generator_and_enrichment() -> None:
    cell = QUICK.perf_analyzer_cells[0]
    systems = (SERVICE, TRITON_CPP, TRITON_CPP_SINGLE)
    found = tuple(
        measurement(cell, name, rate=rate) for name, rate in zip(systems, (80, 100, 50), strict=True)
    )
    text = report.render(replace(results(), perf_analyzer=found), None, RATES, [])

    assert "## The same loads from perf_analyzer" in text
    assert "| 0.80 (0.80 to 0.80) |" in text
    assert "1,000 rows of 6 vectors of 64" in text
    assert "| through one server | 84.0 (x 1.10) |" in text


def test_a_report_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        report.write(tmp_path, tmp_path)


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
