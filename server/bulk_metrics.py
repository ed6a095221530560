"""Metrics of what happens many times a second.

A metric of the client library takes 1 to 2 microseconds for each event: it locks each of its values. Events
wait in lists instead (`server.engine.statistics.Waiting`), and are counted together.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client import Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class BulkHistogram(Histogram):
    """A histogram that observes several values at once. Any thread may call its methods."""

    _buckets: list[Any]
    _sum: Any
    _upper_bounds: list[float]

    def observe_all(self, amounts: Sequence[float]) -> None:
        """Observes values."""
        counts = [0] * len(self._upper_bounds)
        for amount in amounts:
            counts[bisect_left(self._upper_bounds, amount)] += 1
        self._sum.inc(sum(amounts))
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)


class Flush(Collector):
    """Has no metrics of its own. Registered before others, it flushes them when they are collected."""

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush

    def collect(self) -> Iterable[Metric]:
        """Flushes."""
        self._flush()
        return ()
