"""What a run costs on this machine: a small model, fitted to runs that are timed when a model is loaded."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# Sizes that are timed: sequences of a run, and the length of each.
TIMED_SIZES = ((1, 1), (1, 16), (1, 64), (8, 16), (1, 256), (8, 64), (1, 512))
TIMED_ROUNDS = 3
# Larger sizes are left out once a run takes this long.
ENOUGH_SECONDS = 0.05


@dataclass(frozen=True)
class RunCost:
    """Seconds of a run: `call + row_operations * row + pair_operations * pair`.

    Attributes:
        call: Seconds of a run beside its arithmetic.
        row: Seconds of an operation on the rows: the projections.
        pair: Seconds of an operation on the pairs of query and key: the attention itself.
    """

    call: float
    row: float
    pair: float

    def seconds(self, row_operations: float, pair_operations: float) -> float:
        """What a run of that many operations takes."""
        return self.call + row_operations * self.row + pair_operations * self.pair


# For a model that was not timed: 50 microseconds and 100 GFLOP/s.
UNTIMED = RunCost(call=5e-5, row=1e-11, pair=1e-11)


def fit(operations: Sequence[tuple[float, float]], seconds: Sequence[float]) -> RunCost:
    """The cost whose relative error over timed runs is least, by least squares without negative terms.

    Args:
        operations: Row and pair operations of each run.
        seconds: What each took.
    """
    taken = np.array(seconds)
    terms = np.column_stack([np.ones(len(taken)), np.array(operations, dtype=float)]) / taken[:, None]
    scale = terms.max(axis=0, initial=np.finfo(float).tiny)
    used = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(terms[:, used] / scale[used], np.ones(len(taken)), rcond=None)
        if (found >= 0).all():
            break
        used.pop(int(found.argmin()))
    coefficients = np.zeros(3)
    coefficients[used] = found / scale[used]
    return RunCost(*coefficients.tolist())


def time_runs(
    sizes: Iterable[tuple[int, int]], run: Callable[[int, int], object]
) -> dict[tuple[int, int], float]:
    """The shortest of some runs of each size, in seconds: what disturbs a run only makes it longer."""
    taken: dict[tuple[int, int], float] = {}
    for size in sizes:
        taken[size] = min(_time(lambda size=size: run(*size)) for _ in range(TIMED_ROUNDS))  # type: ignore[misc]
        if taken[size] > ENOUGH_SECONDS:
            break
    return taken


def _time(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
