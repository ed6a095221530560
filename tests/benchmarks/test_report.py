"""Ratios and the report, of invented measurements."""

from pathlib import Path

from benchmarks import report
from benchmarks.run import EAGER, ECHO, ONNX, SERVICE, STREAM, TYPED, AtRate, Findings
from benchmarks.systems import Measurement, ratio, spread
from benchmarks.workload import NARROW, QUICK

RATES = {ONNX: 900.0, EAGER: 600.0, ECHO: 3000.0, SERVICE: 500.0, TYPED: 400.0, STREAM: 800.0, "peer": 250.0}


def measured(rate: float) -> Measurement:
    return Measurement(rate, rate, 1000.0)


def test_ratios_are_taken_round_by_round() -> None:
    # In the second round the machine is half as fast for both; in the third, one of them failed.
    rounds: dict[str, list[Measurement | None]] = {
        "this": [measured(200), measured(100), None],
        "other": [measured(100), measured(50), measured(9)],
    }
    assert ratio(rounds, "this", "other") == spread([2.0, 2.0])
    assert ratio(rounds, "this", "absent") is None


def test_a_report_has_targets_tables_plots_and_what_failed(tmp_path: Path) -> None:
    rounds: dict[str, list[Measurement | None]] = {
        name: [Measurement(rate, rate * 50, 1e6 / rate, 200.0), None] for name, rate in RATES.items()
    }
    grid = {cell: rounds for model in QUICK.models for cell in QUICK.cells(model)}
    at_rates = [AtRate(QUICK.cells(NARROW)[0], SERVICE, 250.0, 0.5, 1000, 0, [900.0, 1000.0, 2000.0, None])]
    found = Findings(grid, at_rates, ["peer, 6 x 64, 1 in flight: refused"])
    text = report.write(found, {"machine": "invented"}, tmp_path).read_text()
    assert "| 6 x 64, 1 in flight | 900 | 600 | 3,000 | 500 | 400 | 800 | 250 |" in text
    assert "| 6 x 64 | service | 250 (50%) | 900 | 1,000 | 2,000 | - | 1,000 | 0 |" in text
    assert "| rate on a stream / rate of unary calls | 2.00 (2.00 to 2.00) | ≥ 1.5 | met |" in text
    assert "service / peer" in text
    assert "refused (1 times)" in text
    assert len(list(tmp_path.glob("*.png"))) == 2
    nothing = report.write(Findings(failures=["service: refused"]), {}, tmp_path).read_text()
    assert nothing.count("| not measured |") == 5
