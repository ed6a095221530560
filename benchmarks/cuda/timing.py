"""Times calls in process."""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

WARM_CALLS = 3
LEAST_CALLS = 3


class Timing(NamedTuple):
    """Durations of one call, in seconds."""

    median: float
    shortest: float
    calls: int


def time_call(call: Callable[[], object], seconds: float) -> Timing:
    """Repeats a call, which returns when its result is there, for at least that time."""
    for _ in range(WARM_CALLS):
        call()
    durations: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(durations) < LEAST_CALLS:
        started = time.perf_counter()
        call()
        durations.append(time.perf_counter() - started)
    return Timing(median(durations), min(durations), len(durations))
