"""Rounds, ratios and checkouts, with systems that measure nothing."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from benchmarks.channel import CallFailedError
from benchmarks.checkout import Checkout
from benchmarks.report import share_of_ceiling
from benchmarks.systems import Measurement, combined, measure_in_rounds, percentiles, ratio, spread
from benchmarks.workload import SHORT, WIDE, Cell

CELL = Cell(WIDE, SHORT, 32)


def measured(rate: float, client_us: float = 0.0, server_us: float = 0.0) -> Measurement:
    return Measurement(rate, rate, 1000.0, client_us, server_us)


@dataclass(frozen=True)
class Invented:
    name: str
    order: list[str]

    def measure(self, _cell: Cell) -> Measurement:
        self.order.append(self.name)
        if len(self.order) == 1:
            raise CallFailedError("refused")
        return measured(len(self.order))


def test_each_round_begins_with_another_system_and_failures_are_kept() -> None:
    order: list[str] = []
    failures: list[str] = []
    found = measure_in_rounds(CELL, [Invented("a", order), Invented("b", order)], 3, failures)

    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found["a"] == [None, measured(4), measured(5)]
    assert failures == [f"a, {CELL.name}: refused"]


def test_ratios_are_taken_round_by_round() -> None:
    # In the second round the machine is half as fast for both; in the third, one of them failed.
    rounds: dict[str, list[Measurement | None]] = {
        "this": [measured(200), measured(100), None],
        "other": [measured(100), measured(50), measured(9)],
    }

    assert ratio(rounds, "this", "other") == spread([2.0, 2.0])
    assert ratio(rounds, "this", "absent") is None


def test_the_ceiling_counts_compute_and_transport() -> None:
    # A run of 4 ms, and 1 ms of transport on each of two cores.
    rounds = {"service": [measured(200)], "run": [measured(250)], "echo": [measured(9, 1_200, 800)]}
    found = combined(rounds, ("service", "run", "echo"), lambda *own: share_of_ceiling(*own, cores=2))

    assert found is not None
    assert found.median == pytest.approx(1.0)


def test_a_percentile_with_too_few_requests_beyond_it_is_left_out() -> None:
    found = percentiles(np.arange(1, 101, dtype=np.int64) * 1_000)

    assert found == [50.0, 90.0, 99.0, None]
    assert percentiles(np.array([], np.int64)) == [None] * 4


def make_checkout(folder: Path, code: str) -> Checkout:
    for package in ("artifact", "export", "model"):
        (folder / package).mkdir(parents=True)
        (folder / package / "file.py").write_text(code)
    return Checkout(folder)


def test_checkouts_share_exported_models_only_if_their_exporters_are_equal(tmp_path: Path) -> None:
    one, same, other = (
        make_checkout(tmp_path / name, code) for name, code in (("a", "1"), ("b", "1"), ("c", "2"))
    )

    assert one.repository(tmp_path) == same.repository(tmp_path)
    assert one.repository(tmp_path) != other.repository(tmp_path)


def test_a_checkout_runs_its_own_code_without_settings_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTENTION_THREADS", "7")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    environment = Checkout(tmp_path).environment

    assert environment["PYTHONPATH"].split(":") == [str(tmp_path), str(tmp_path / "clients/python/src")]
    assert "ATTENTION_THREADS" not in environment
