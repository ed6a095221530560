"""Percentiles of latencies, from an HdrHistogram of three significant digits."""

from dataclasses import dataclass

import numpy as np
from hdrh.histogram import HdrHistogram
from numpy.typing import NDArray

LONGEST = 3_600_000_000_000  # nanoseconds; one hour
DIGITS = 3
MICROSECOND = 1_000
# A percentile that fewer requests lie beyond is that of a single stall.
LEAST_BEYOND = 1


@dataclass(frozen=True)
class Percentiles:
    """Latencies in microseconds; None where there were too few requests for one."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None
    p99_9: float | None


def percentiles(latencies: NDArray[np.int64]) -> Percentiles:
    """Summarises latencies in nanoseconds."""
    histogram = HdrHistogram(1, LONGEST, DIGITS)
    for latency in latencies.tolist():
        histogram.record_value(latency)

    def at(percent: float) -> float | None:
        if len(latencies) * (100 - percent) / 100 < LEAST_BEYOND and percent > 50:  # noqa: PLR2004 - the median
            return None
        if not len(latencies):
            return None
        return float(histogram.get_value_at_percentile(percent)) / MICROSECOND

    return Percentiles(len(latencies), at(50), at(90), at(99), at(99.9))
