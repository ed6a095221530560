"""Times compute in process: one sequence after the other, and padded batches; the better one counts."""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from statistics import median

clock = time.perf_counter_ns


@dataclass(frozen=True)
class Run:
    """One prepared call of the compute, and what it computes."""

    call: Callable[[], object]
    sequences: int
    tokens: int


@dataclass(frozen=True)
class ComputeResult:
    """What was measured.

    Attributes:
        how: Which way of running was the better one.
        runs: Calls that were timed.
        median_seconds: Median of one call.
    """

    how: str
    sequences_per_second: float
    tokens_per_second: float
    runs: int
    seconds: float
    median_seconds: float


def best(ways: Mapping[str, Many[Run]], seconds: float) -> ComputeResult:
    """Measures each way for its share of the time and returns the one that computes most rows."""
    share = seconds / len(ways)
    results = [measure(how, runs, share) for how, runs in ways.items()]
    return max(results, key=lambda result: result.tokens_per_second)


def measure(how: str, runs: Many[Run], seconds: float) -> ComputeResult:
    """Warms up with one call of each, then repeats all of them until the time is over."""
    for run in runs:
        run.call()
    durations: list[int] = []
    passes = 0
    started = clock()
    while not passes or clock() - started < seconds * 1e9:
        durations += [_time(run) for run in runs]
        passes += 1
    elapsed = (clock() - started) / 1e9
    return ComputeResult(
        how=how,
        sequences_per_second=passes * sum(run.sequences for run in runs) / elapsed,
        tokens_per_second=passes * sum(run.tokens for run in runs) / elapsed,
        runs=len(durations),
        seconds=elapsed,
        median_seconds=median(durations) / 1e9,
    )


def _time(run: Run) -> int:
    started = clock()
    run.call()
    return clock() - started
