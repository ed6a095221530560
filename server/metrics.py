"""Prometheus metrics of calls, batches and models."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from server.engine.model import LoadedModel
from server.engine.observer import BatchReport
from server.engine.repository import Repository

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """All metrics of one server. Observes the calls, and the batches of the engine."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._calls = self._counter(
            "attention_requests", "Number of calls, by method and status code.", "method", "code"
        )
        self._call_seconds = self._histogram(
            "attention_request_seconds", "Duration of a call, in seconds.", "method", SECONDS
        )
        self._batch_sequences = self._histogram(
            "attention_batch_sequences", "Number of sequences in a batch.", "model", SEQUENCES
        )
        self._batch_seconds = self._histogram(
            "attention_batch_seconds", "Time to run a batch, in seconds.", "model", SECONDS
        )
        self._queue_seconds = self._histogram(
            "attention_queue_seconds",
            "Time that a sequence was queued before it ran, in seconds.",
            "model",
            SECONDS,
        )
        self._tokens = self._counter("attention_tokens", "Number of query and key rows in requests.", "model")
        self._padding = self._counter(
            "attention_padding_tokens", "Number of padding rows computed in addition.", "model"
        )
        self._parity = self._gauge(
            "attention_parity_max_abs_error",
            "Largest absolute difference from eager PyTorch, measured on this machine when the model loaded.",
            ["model", "version", "provider"],
            "livemax",
        )
        self._ready = self._gauge(
            "attention_model_ready",
            "1 if the model is ready, 0 while it loads or if it failed to load.",
            ["model", "version"],
            "livemin",
        )

    # Metrics are stored as the cached look-up of their children: the look-up takes longer than the count.
    def _histogram(
        self, name: str, text: str, label: str, buckets: tuple[float, ...]
    ) -> Callable[[str], Histogram]:
        return cache(Histogram(name, text, [label], buckets=buckets, registry=self.registry).labels)

    def _counter(self, name: str, text: str, *labels: str) -> Callable[..., Counter]:
        return cache(Counter(name, text, labels, registry=self.registry).labels)

    def _gauge(
        self, name: str, text: str, labels: list[str], among_workers: Literal["livemin", "livemax"]
    ) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry, multiprocess_mode=among_workers)

    def loading(self, models: Iterable[tuple[str, str]]) -> None:
        """Publishes that these models, given by name and version, are not ready yet."""
        for name, version in models:
            self._ready.labels(name, version).set(0)

    def loaded(self, repository: Repository) -> None:
        """Publishes the state of every model, and the measured parity error of those that are ready."""
        for model in repository:
            ready = isinstance(model, LoadedModel)
            self._ready.labels(model.name, model.version).set(ready)
            if isinstance(model, LoadedModel):
                self._parity.labels(model.name, model.version, model.provider).set(model.measured_error)

    def called(self, method: str, code: str, seconds: float) -> None:
        """Counts a call that ended."""
        self._calls(method, code).inc()
        self._call_seconds(method).observe(seconds)

    def batch_completed(self, report: BatchReport) -> None:
        """Counts a batch that ran."""
        self._batch_sequences(report.model).observe(report.sequences)
        self._batch_seconds(report.model).observe(report.seconds)
        self._tokens(report.model).inc(report.tokens)
        self._padding(report.model).inc(report.padding)
        for seconds in report.queue_seconds:
            self._queue_seconds(report.model).observe(seconds)
