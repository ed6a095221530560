from pathlib import Path

import pytest

from benchmarks.checkout import ROOT, Checkout
from benchmarks.compare import CELLS, Comparison, interleave


def test_windows_alternate_and_each_round_reverses_the_order() -> None:
    order: list[str] = []

    def measure(name: str, rate: float) -> float:
        order.append(name)
        return rate + len(order)

    found = interleave("cell", 3, lambda: measure("this", 10), lambda: measure("other", 20))

    assert order == ["this", "other", "other", "this", "this", "other"]
    assert found == Comparison("cell", this=(11, 14, 15), other=(22, 23, 26))


def test_ratios_are_taken_round_by_round() -> None:
    # In the second round the machine is half as fast for both.
    found = Comparison("cell", this=(200.0, 100.0, 300.0), other=(100.0, 50.0, 100.0))

    assert found.medians == (200.0, 100.0)
    assert (found.ratio.low, found.ratio.median, found.ratio.high) == (2.0, 2.0, 3.0)


def test_a_comparison_without_rounds_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one is needed"):
        _ = Comparison("cell", (), ()).ratio


def test_cells_have_distinct_names() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS) == 7


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
    assert (Checkout().root / "benchmarks").is_dir()
    assert Checkout().root == ROOT
