"""A histogram for what happens many times a second, and events that wait until somebody looks.

A metric of the client library takes 1 to 2 microseconds for each event: it locks each of its values. Events
are collected in lists instead, and counted together.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from prometheus_client import Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

T = TypeVar("T")
# How many events wait at most.
MOST_WAITING = 1024


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


class Waiting(Generic[T]):
    """Events that wait to be counted. Any thread may call its methods; each event is counted once."""

    def __init__(self, count: Callable[[list[T]], None]) -> None:
        """Begins without events.

        Args:
            count: Counts some events, at least one.
        """
        self._count = count
        self._events: deque[T] = deque()

    def add(self, event: T) -> None:
        """Adds an event."""
        self._events.append(event)
        if len(self._events) > MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        """Counts the events so far."""
        events = []
        while self._events:
            try:
                events.append(self._events.popleft())
            except IndexError:  # another thread has taken the last
                break
        if events:
            self._count(events)


class Flush(Collector):
    """Has no metrics of its own. Registered before others, it flushes them when they are collected."""

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush

    def collect(self) -> Iterable[Metric]:
        """Flushes."""
        self._flush()
        return ()
