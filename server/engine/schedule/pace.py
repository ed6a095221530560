"""How long runs really take, beside what was measured at the load; and whether all threads are faster.

A machine is not always as busy as it was when a model was loaded. The model's costs state what a run takes in
relation to others; a `Pace` follows how many times as long runs of one graph take, on one thread and on all.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

# Weight of a slower run beside the earlier ones, and how many times as long it counts at most. A faster run
# replaces them: disturbances only add time.
WEIGHT, MOST_SLOWER = 0.3, 2.0
# The way that looks slower is tried again after so many runs, then after twice as many, and so on up to the
# last number, each time in two runs: the first finds its weights in no cache. Below a hundredth of all runs.
FIRST_TRIAL, LAST_TRIAL, TRIAL_RUNS = 8, 256, 2


@dataclass(eq=False, slots=True)
class _Size:
    """Runs of one order of magnitude.

    Attributes:
        ratios: Duration by what was expected, on one thread and on all.
        is_parallel: Whether all threads were faster at the last choice.
        runs: Number of choices since that changed.
    """

    ratios: list[float]
    is_parallel: bool = False
    runs: int = 0


class Pace:
    """The pace of the runs of one graph, by their size. For one thread at a time, as the queue is."""

    def __init__(self, parallel: Mapping[float, float] | None = None) -> None:
        """Begins with what was measured at the load.

        Args:
            parallel: How many times as long as on one thread runs take on all, by the seconds that they are
                expected to take on one; None if they have one thread only.
        """
        # By powers of two of the expected seconds.
        self._sizes: dict[int, _Size] = {}
        for seconds, ratio in (parallel or {}).items():
            self._sizes[_magnitude(seconds)] = _Size([1.0, ratio])

    def _size(self, expected: float) -> _Size:
        magnitude = _magnitude(expected)
        if (size := self._sizes.get(magnitude)) is None:
            nearest = min(self._sizes, key=lambda other: abs(other - magnitude), default=None)
            parallel = math.inf if nearest is None else self._sizes[nearest].ratios[True]
            size = self._sizes[magnitude] = _Size([1.0, parallel])
        return size

    def seconds(self, expected: float, *, parallel: bool = False) -> float:
        """Expected duration of a run now.

        Args:
            expected: Its duration on one thread as measured at the load, in seconds.
            parallel: Whether it has all threads; it then is infinite if it cannot have them.
        """
        return expected * self._size(expected).ratios[parallel]

    def least_seconds(self, expected: float) -> float:
        """The same, on one thread or on all, whichever is faster."""
        return expected * min(self._size(expected).ratios)

    def choose_threads(self, expected: float) -> bool:
        """Whether a run that has the machine to itself is to have all threads: the faster way, or a trial."""
        size = self._size(expected)
        one, parallel = size.ratios
        if parallel == math.inf:
            return False
        if (is_parallel := parallel < one) != size.is_parallel:
            size.is_parallel, size.runs = is_parallel, 0
        size.runs += 1
        last_trial = min(1 << (size.runs.bit_length() - 1), LAST_TRIAL)
        is_trial = size.runs >= FIRST_TRIAL and size.runs % last_trial < TRIAL_RUNS
        return is_parallel != is_trial

    def observe(self, expected: float, seconds: float, *, parallel: bool) -> None:
        """Learns from a run that had the machine to itself."""
        ratios, ratio = self._size(expected).ratios, seconds / expected if expected else 1.0
        slower = min(ratio, MOST_SLOWER * ratios[parallel]) - ratios[parallel]
        ratios[parallel] += slower if slower < 0 else WEIGHT * slower


def _magnitude(seconds: float) -> int:
    return math.frexp(seconds)[1]
