from pathlib import Path

from benchmarks import report
from benchmarks.run import EAGER, ECHO, ONNX, SERVICE, STREAM, TYPED, AtRate, Findings
from benchmarks.systems import Measurement
from benchmarks.workload import NARROW, QUICK

RATES = {ONNX: 900.0, EAGER: 600.0, ECHO: 3000.0, SERVICE: 500.0, TYPED: 400.0, STREAM: 800.0, "peer": 250.0}


def rounds() -> dict[str, list[Measurement | None]]:
    return {
        name: [Measurement(rate, rate * 50, 1e6 / rate, 100.0, 200.0), None] for name, rate in RATES.items()
    }


def test_a_report_has_targets_tables_plots_and_what_failed(tmp_path: Path) -> None:
    grid = {cell: rounds() for model in QUICK.models for cell in QUICK.cells(model)}
    cell = QUICK.cells(NARROW)[0]
    at_rates = [AtRate(cell, SERVICE, 250.0, 0.5, 1000, 0, [900.0, 1000.0, 2000.0, None])]
    found = Findings(grid, at_rates, ["peer, 6 x 64, 1 in flight: refused"])
    text = report.write(found, {"machine": "invented"}, 2, tmp_path).read_text()

    assert "| 6 x 64, 1 in flight | 900 | 600 | 3,000 | 500 | 400 | 800 | 250 |" in text
    assert "| 6 x 64 | service | 250 (50%) | 900 | 1,000 | 2,000 | - | 1,000 | 0 |" in text
    assert "| rate on a stream / rate of unary calls | 2.00 (2.00 to 2.00) | ≥ 1.5 | met |" in text
    assert "service / peer" in text
    assert "refused (1 times)" in text
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "latency-against-length.png",
        "throughput-against-load.png",
    }


def test_a_run_that_measured_nothing_is_reported(tmp_path: Path) -> None:
    text = report.write(Findings(failures=["service: refused"]), {}, 2, tmp_path).read_text()
    assert text.count("| not measured |") == 6
