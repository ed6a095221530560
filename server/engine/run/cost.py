"""Cost of runs on this machine: a linear model, fitted to runs that are timed when a model is loaded."""

import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

# Sizes that are timed: number of sequences, and length of each. As few as tell the three terms apart, because
# a model is not ready before: further ones took most of the time and did not make predictions better.
TIMED_SIZES = ((1, 1), (1, 16), (1, 64), (8, 16), (1, 512))
# On a device. Small runs take hardly longer than the call, so that only large ones tell what a row costs.
TIMED_SIZES_ON_DEVICE = (
    (1, 1),
    (1, 64),
    (8, 16),
    (1, 512),
    (8, 64),
    (32, 64),
    (8, 512),
    (32, 256),
    (64, 512),
    (8, 2048),
)
# Of runs of one sequence at a time: those in blocks, and those on all threads.
TIMED_SIZES_ALONE = ((1, 1), (1, 16), (1, 128), (1, 512))
# Runs of a size are repeated until the two shortest agree and all have taken the first of these times; until
# all have taken the second, if others disturb them; or until there are that many.
TIMED_SECONDS, MOST_TIMED_SECONDS = 0.005, 0.025
MOST_TIMED_ROUNDS = 10
# At least so many runs of each size are timed on a clock that goes on while other processes have the core.
LEAST_TIMED_ROUNDS = 2
# Two ways to run a size are compared at least twice, and until each has taken so long.
COMPARED_SECONDS = 0.01
# Two runs agree if the longer one takes at most this many times as long.
AGREEMENT = 1.1
# Fewer operations for each second are taken for none: their cost would not be finite.
LEAST_SCALE = 1e-280
# Larger sizes are skipped once a run takes this long.
LONG_ENOUGH_SECONDS = 0.05


@dataclass(frozen=True)
class RunCost:
    """Duration of a run in seconds: `call + row_operations * row + pair_operations * pair`.

    Attributes:
        call: Fixed seconds of a run.
        row: Seconds of one operation on rows (the projections).
        pair: Seconds of one operation on pairs of query and key rows (the attention products).
    """

    call: float
    row: float
    pair: float

    def seconds(self, row_operations: float, pair_operations: float) -> float:
        """Expected duration of a run of that many operations, in seconds."""
        return self.call + row_operations * self.row + pair_operations * self.pair


# Assumed for a model that was not timed: 50 microseconds and 100 GFLOP/s.
UNTIMED = RunCost(call=5e-5, row=1e-11, pair=1e-11)


def fit(operations: Sequence[tuple[float, float]], seconds: Sequence[float]) -> RunCost:
    """Fits a cost to timed runs: least squares of the relative error, without negative coefficients.

    Args:
        operations: Row and pair operations of each run.
        seconds: Duration of each run.
    """
    durations = np.array(seconds)
    terms = np.column_stack([np.ones(len(durations)), np.array(operations, dtype=float)]) / durations[:, None]
    scale = terms.max(axis=0, initial=LEAST_SCALE)
    used = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(terms[:, used] / scale[used], np.ones(len(durations)), rcond=None)
        if (found >= 0).all():
            break
        used.pop(int(found.argmin()))
    coefficients = np.zeros(3)
    coefficients[used] = found / scale[used]
    return RunCost(*coefficients.tolist())


def time_runs(
    sizes: Iterable[tuple[int, int]],
    run: Callable[[int, int], object],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[tuple[int, int], float]:
    """Times runs of each size, in seconds. The shortest of a few counts: disturbances only add time.

    Args:
        sizes: Number of sequences, and length of each.
        run: Runs a size.
        clock: Seconds. `time.thread_time`, for runs that other threads take no part in, leaves out the time
            in which other processes have the core.

    Raises:
        MemoryError: The first run needs more memory than there is. Later sizes are then skipped instead.
    """
    durations: dict[tuple[int, int], float] = {}
    for size in sizes:
        try:
            durations[size] = _shortest(partial(run, *size), clock)
        except MemoryError:
            if not durations:
                raise
            break
        if durations[size] > LONG_ENOUGH_SECONDS:
            break
    return durations


def time_in_turns(
    sizes: Iterable[tuple[int, int]],
    first: Callable[[int, int], object],
    second: Callable[[int, int], object],
) -> dict[tuple[int, int], float]:
    """Compares two ways to run each size by the wall clock: duration of the first divided by the second.

    All sizes and both ways are timed by turns. Another process that has a core for some milliseconds then
    disturbs a few runs of each, and not all runs of one.

    Args:
        sizes: Number of sequences, and length of each, in ascending order.
        first: Runs a size.
        second: Runs it in another way.

    Raises:
        MemoryError: The first run needs more memory than there is. Later sizes are then skipped instead.
    """
    found: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
    waiting, turn = list(sizes), 0
    while waiting:
        turn += 1
        for index, size in enumerate(waiting):
            durations = found.setdefault(size, ([], []))
            try:
                for run, taken in zip((first, second), durations, strict=True):
                    for _ in range(LEAST_TIMED_ROUNDS):  # the first one finds the caches of the other way
                        started = time.perf_counter()
                        run(*size)
                        taken.append(time.perf_counter() - started)
            except MemoryError:
                if not all(durations):
                    del found[size]
                if not found:
                    raise
                waiting[index:] = []
            else:
                if max(map(min, durations)) > LONG_ENOUGH_SECONDS:
                    waiting[index + 1 :] = []
        waiting = [size for size in waiting if turn == 1 or min(map(sum, found[size])) < COMPARED_SECONDS]
    return {size: min(first) / min(second) for size, (first, second) in found.items()}


def _shortest(call: Callable[[], object], clock: Callable[[], float]) -> float:
    least = 1 if clock is time.thread_time else LEAST_TIMED_ROUNDS
    durations: list[float] = []
    while len(durations) < least or (len(durations) < MOST_TIMED_ROUNDS and not _is_enough(durations)):
        started = clock()
        call()
        insort(durations, clock() - started)
    return durations[0]


def _is_enough(durations: Sequence[float]) -> bool:
    """Whether these runs, the shortest first, tell the duration of an undisturbed one."""
    agree = len(durations) > 1 and durations[1] <= AGREEMENT * durations[0]
    return sum(durations) >= (TIMED_SECONDS if agree else MOST_TIMED_SECONDS)
