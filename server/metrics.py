"""Prometheus metrics: what the engine and the calls report, and the endpoint that shows it."""

from collections.abc import Callable
from functools import cache
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    start_http_server,
)

from server.engine.model import LoadedModel
from server.engine.observer import BatchReport
from server.engine.repository import Repository
from server.errors import BindError

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """All metrics of one server. Observes the engine's runs and the calls."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._calls = self._counter(
            "attention_requests", "Calls by method and status code.", "method", "code"
        )
        self._call_seconds = self._histogram(
            "attention_request_seconds", "Duration of a call.", "method", SECONDS
        )
        self._run_sequences = self._histogram(
            "attention_batch_sequences", "Sequences that ran together.", "model", SEQUENCES
        )
        self._run_seconds = self._histogram("attention_batch_seconds", "Duration of a run.", "model", SECONDS)
        self._waited = self._histogram(
            "attention_queue_seconds", "Wait of a sequence for its run.", "model", SECONDS
        )
        self._tokens = self._counter("attention_tokens", "Query and key rows that were asked for.", "model")
        self._padding = self._counter(
            "attention_padding_tokens", "Rows that were computed beside those.", "model"
        )
        self._parity = self._gauge(
            "attention_parity_max_abs_error",
            "Largest difference from eager PyTorch, measured on this machine before the model was ready.",
            ["model", "version", "provider"],
            "livemax",
        )
        self._ready = self._gauge(
            "attention_model_ready", "1 for a model that answers.", ["model", "version"], "livemin"
        )

    # Each metric is kept as the cached look-up of its children, which costs every call more than counting.
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

    def loaded(self, repository: Repository) -> None:
        """Publishes the state and the measured parity error of every model."""
        for model in repository:
            ready = isinstance(model, LoadedModel)
            self._ready.labels(model.name, model.version).set(ready)
            if isinstance(model, LoadedModel):
                self._parity.labels(model.name, model.version, model.provider).set(model.measured_error)

    def called(self, method: str, code: str, seconds: float) -> None:
        """One call ended."""
        self._calls(method, code).inc()
        self._call_seconds(method).observe(seconds)

    def batch_completed(self, report: BatchReport) -> None:
        """Counts a completed report."""
        self._run_sequences(report.model).observe(report.sequences)
        self._run_seconds(report.model).observe(report.seconds)
        self._tokens(report.model).inc(report.tokens)
        self._padding(report.model).inc(report.padding)
        for seconds in report.queue_seconds:
            self._waited(report.model).observe(seconds)

    def serve(self, host: str, port: int) -> "MetricsServer":
        """Shows the metrics on http://host:port/metrics."""
        return MetricsServer(self.registry, host, port)


class MetricsServer:
    """The HTTP endpoint; listens until it is closed."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Listens.

        Raises:
            BindError: The address is taken or is none of this machine's.
        """
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise BindError(f"cannot listen on {host}:{port} for metrics: {error.strerror}") from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
