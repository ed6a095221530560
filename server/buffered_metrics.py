"""Counters and histograms for what happens several times for each request.

A metric of the client library takes 1 to 2 microseconds for each event: it locks each of its values. Here an
event adds to plain numbers, in a fraction of that. They become part of the metric when it is collected, and
when `flush` is called: a worker's metrics are not collected by its own process.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any

from prometheus_client import Counter, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.samples import Sample


class _Buffered(MetricWrapperBase):
    """What the buffered metrics share: when they are published."""

    def flush(self) -> None:
        """Adds what happened since the last time to the metric, or to the metrics of all labels."""
        if self._labelnames and not self._labelvalues:
            children: tuple[Any, ...] = tuple(self._metrics.values())
            for child in children:
                child.flush()
        else:
            self._publish()

    def _publish(self) -> None:
        raise NotImplementedError

    def _child_samples(self) -> Iterable[Sample]:
        self._publish()
        return super()._child_samples()


class BufferedCounter(_Buffered, Counter):
    """A counter of events that are frequent. Any thread may call its methods."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._buffer_lock = Lock()
        self._buffered = 0.0

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:  # noqa: ARG002
        """Counts. Exemplars are ignored.

        Args:
            amount: By how much, not negative.
            exemplar: Ignored.
        """
        with self._buffer_lock:
            self._buffered += amount

    def _publish(self) -> None:
        with self._buffer_lock:
            amount, self._buffered = self._buffered, 0.0
        if amount:
            super().inc(amount)


class BufferedHistogram(_Buffered, Histogram):
    """A histogram of values that are observed frequently. Any thread may call its methods."""

    _buckets: list[Any]
    _sum: Any
    _upper_bounds: list[float]

    def _metric_init(self) -> None:
        super()._metric_init()
        self._buffer_lock = Lock()
        self._clear()

    def _clear(self) -> None:
        self._buffered = [0] * len(self._upper_bounds)
        self._buffered_sum = 0.0

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:  # noqa: ARG002
        """Observes a value. Exemplars are ignored.

        Args:
            amount: The value.
            exemplar: Ignored.
        """
        self.observe_all((amount,))

    def observe_all(self, amounts: Sequence[float]) -> None:
        """Observes several values."""
        with self._buffer_lock:
            for amount in amounts:
                self._buffered[bisect_left(self._upper_bounds, amount)] += 1
            self._buffered_sum += sum(amounts)

    def _publish(self) -> None:
        with self._buffer_lock:
            counts, total = self._buffered, self._buffered_sum
            self._clear()
        if not any(counts):
            return
        self._sum.inc(total)
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)
