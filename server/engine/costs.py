"""What runs of a model cost: as measured at its load, and how many times as long they take now.

A machine is not always as busy as it was when a model was loaded. The measured costs state what a run
takes in relation to others; a `Pace` follows how many times as long runs of one graph take, on one thread
and on all.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import frexp
from typing import NamedTuple

from attention_serving.artifact.manifest import GraphKind

# Weight of a slower run compared with the earlier ones, and how many times as long it counts at most. A
# faster run replaces them: disturbances only add time.
WEIGHT, MOST_SLOWER = 0.1, 2.0
# The way that looks slower is tried again after so many runs, then after twice as many, and so on up to the
# last number, each time in a few: the first finds its weights in no cache. Below a hundredth of all runs.
FIRST_TRIAL, LAST_TRIAL, TRIAL_RUNS = 16, 512, 4


@dataclass(frozen=True)
class RunCost:
    """Duration of a run in seconds: `fixed + row_operations * row + pair_operations * pair`.

    Attributes:
        fixed: Fixed seconds of a run.
        row: Seconds of one operation on rows (the projections).
        pair: Seconds of one operation on pairs of query and key rows (the attention products).
    """

    fixed: float
    row: float
    pair: float

    def seconds(self, row_operations: float, pair_operations: float) -> float:
        """Expected duration of a run of that many operations, in seconds."""
        return self.fixed + row_operations * self.row + pair_operations * self.pair


class ContextCost(NamedTuple):
    """Duration of a run of Tq query rows and a context of Tk rows, in seconds.

    It is `fixed + Tk * key_row + Tq * query_row + Tq * Tk * pair`.
    """

    fixed: float
    key_row: float
    query_row: float
    pair: float


# Assumed for a model that was not timed: 50 microseconds and 100 GFLOP/s.
UNTIMED = RunCost(fixed=5e-5, row=1e-11, pair=1e-11)
UNTIMED_CONTEXT = ContextCost(fixed=5e-5, key_row=1e-7, query_row=1e-5, pair=1e-8)


@dataclass(eq=False, slots=True)
class _Size:
    """Runs of one order of magnitude.

    Attributes:
        ratios: Duration by what was expected, on one thread and on all; 0 for all if that was not tried, and
            infinite if it cannot be.
        is_parallel: Whether all threads were faster at the last choice.
        runs: Number of choices since that changed.
    """

    ratios: list[float]
    is_parallel: bool = False
    runs: int = 0


class Pace:
    """The pace of the runs of one graph, by their size. For one thread at a time, as the queue is."""

    def __init__(self, *, has_all_threads: bool) -> None:
        """Begins with what was measured at the load on one thread. All threads are tried by the first run.

        Args:
            has_all_threads: Whether runs can have all threads.
        """
        untried = 0.0 if has_all_threads else math.inf
        # By the binary exponent of the expected seconds.
        self._sizes = defaultdict[int, _Size](lambda: _Size([1.0, untried]))

    def least_seconds(self, expected: float) -> float:
        """Expected duration of a run now, on one thread or on all, whichever is faster.

        Args:
            expected: Its duration on one thread as measured at the load, in seconds.

        Returns:
            Seconds; 0 if all threads were not tried.
        """
        return expected * min(self._sizes[frexp(expected)[1]].ratios)

    def choose(self, expected: float, *, is_alone: bool) -> tuple[bool, float]:
        """Whether a run has all threads, and its expected duration now.

        Args:
            expected: Its duration on one thread as measured at the load, in seconds.
            is_alone: Whether it has the machine to itself: only then it may have all threads, if they are
                faster or tried again.
        """
        size = self._sizes[frexp(expected)[1]]
        single, parallel = size.ratios
        takes_all = False
        if is_alone and parallel != math.inf:
            if (is_parallel := parallel < single) != size.is_parallel:
                size.is_parallel, size.runs = is_parallel, 0
            size.runs += 1
            last_trial = min(1 << (size.runs.bit_length() - 1), LAST_TRIAL)
            is_trial = size.runs >= FIRST_TRIAL and size.runs % last_trial < TRIAL_RUNS
            takes_all = is_parallel != is_trial
        return takes_all, expected * ((parallel if takes_all else single) or 1.0)

    def observe(self, expected: float, seconds: float, *, parallel: bool) -> None:
        """Learns from a run that had the machine to itself."""
        ratios, ratio = self._sizes[frexp(expected)[1]].ratios, seconds / expected if expected else 1.0
        before = ratios[parallel] or ratio
        slower = min(ratio, MOST_SLOWER * before) - before
        ratios[parallel] = before + (slower if slower < 0 else WEIGHT * slower)


@dataclass(frozen=True, eq=False)
class Costs:
    """What runs of one model cost.

    Attributes:
        run_costs: Measured cost of runs of each graph on this machine, if it was calibrated.
        context_cost: Measured cost of runs of queries to a context.
        paces: How long runs of each graph take in relation to that, and on all threads.
    """

    run_costs: Mapping[GraphKind, RunCost] = field(default_factory=dict)
    context_cost: ContextCost = UNTIMED_CONTEXT
    paces: dict[GraphKind, Pace] = field(default_factory=dict)
