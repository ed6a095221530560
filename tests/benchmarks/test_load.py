"""What figures rest on: arrivals and ratios."""

import numpy as np

from benchmarks.load import poisson
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
