"""What figures rest on: arrivals, ratios, and processes that end."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.load import poisson
from benchmarks.processes import is_running, process_tree, running
from benchmarks.systems import Measurement, Spread, ratio


def test_arrivals_are_a_reproducible_poisson_process() -> None:
    due = poisson(1000, 20, seed=3)
    assert np.array_equal(due, poisson(1000, 20, seed=3))
    assert len(due) == 20_000
    assert 0 <= due[0] <= due[-1] < 20e9
    # Exponential gaps have a standard deviation equal to their mean.
    assert np.isclose(np.diff(due).std(), 1e6, rtol=0.05)


def measured(rate: float) -> Measurement:
    return Measurement(rate, rate, 1000.0)


def test_ratios_are_taken_round_by_round() -> None:
    # In the second round the machine is half as fast for both; in the third, one of them failed.
    rounds: dict[str, list[Measurement | None]] = {
        "this": [measured(200), measured(100), None],
        "other": [measured(100), measured(50), measured(9)],
    }
    assert ratio(rounds, "this", "other") == Spread(2.0, 2.0, 2.0)
    assert ratio(rounds, "this", "absent") is None


@pytest.mark.timeout(30)
def test_a_stopped_process_leaves_no_children(tmp_path: Path) -> None:
    script = "import subprocess; subprocess.run(['sleep', '60'])"
    with running([sys.executable, "-c", script], tmp_path / "log", os.environ) as process:
        while len(tree := process_tree(process.pid)) < 2:
            assert process.poll() is None
    while any(is_running(pid) for pid in tree):
        pass  # SIGKILL takes effect soon; a process that it does not reach runs into the test's timeout
