"""Metrics of several processes: each writes to files, and one endpoint serves the aggregate."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, disable_created_metrics, values
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from attention_serving.server.child_process import ExitKind
from attention_serving.server.gauges import FOLDER_VARIABLE, NO_VALUE
from attention_serving.server.metrics_endpoint import MetricsEndpoint
from attention_serving.server.process_metrics import Processes, ProcessesCollector
from attention_serving.server.security.guard import Guard
from attention_serving.server.tls.files import CurrentCertificates


def write_to(folder: Path, worker: int) -> None:
    """Makes this process write its metrics to files in a folder. Call it before the first metric is created.

    The files are named after the number of the worker, not after the process as by default: a replacement
    continues the counts of its predecessor, and restarts do not leave files behind.
    """
    os.environ[FOLDER_VARIABLE] = str(folder)
    values.ValueClass = values.MultiProcessValue(lambda: worker)  # type: ignore[no-untyped-call]


class _Collector(MultiProcessCollector):
    """Skips values that were removed, and files that a worker is creating, which the library cannot read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(None, str(folder))  # type: ignore[no-untyped-call]
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        """The aggregate of all files."""
        files = [str(file) for file in self._folder.glob("*.db") if _is_written(file)]
        metrics: Iterable[Metric] = self.merge(files)  # type: ignore[no-untyped-call]
        for metric in metrics:
            metric.samples = [sample for sample in metric.samples if sample.value != NO_VALUE]
            yield metric


def _is_written(file: Path) -> bool:
    try:
        return file.stat().st_size > 0
    except FileNotFoundError:  # the worker has just ended
        return False


def own_metrics(registry: CollectorRegistry) -> tuple[Gauge, Counter]:
    """The supervisor's own metrics: the number of workers, and that of their restarts."""
    workers = Gauge(
        "attention_workers", "Number of worker processes, by state.", ["state"], registry=registry
    )
    restarts = Counter(
        "attention_worker_restarts",
        "Number of worker processes that ended and were replaced, by the reason.",
        ["reason"],
        registry=registry,
    )
    return workers, restarts


class MultiprocessMetrics:
    """Serves the metrics of all workers until it is closed."""

    def __init__(
        self,
        folder: Path,
        host: str,
        port: int,
        certificates: CurrentCertificates | None = None,
        guard: Guard | None = None,
    ) -> None:
        """Starts to listen.

        Args:
            folder: Where the workers write their metrics.
            host: Address or host name.
            port: 0 selects a free port.
            certificates: Give the certificate of the next connection; None encrypts nothing.
            guard: Knows who may read the metrics; None lets everyone.

        Raises:
            BindError: The address is in use, or does not belong to this machine.
        """
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._folder = str(folder)
        self._processes: Processes = dict
        registry = CollectorRegistry()
        registry.register(_Collector(folder))
        registry.register(ProcessesCollector(self._running))
        self._workers, self._restarts = own_metrics(registry)
        for kind in ExitKind:
            self._restarts.labels(kind)
        self._endpoint = MetricsEndpoint(registry, host, port, certificates=certificates, guard=guard)
        self.port = self._endpoint.port

    def watch(self, processes: Processes) -> None:
        """Sets the processes whose processor time, memory and descriptors are published; before, none are.

        Args:
            processes: Process ids by name. Called at every scrape, on any thread.
        """
        self._processes = processes

    def _running(self) -> Mapping[str, int]:
        return self._processes()

    def count(self, *, ready: int, starting: int) -> None:
        """Publishes how many workers are in each state."""
        self._workers.labels("ready").set(ready)
        self._workers.labels("starting").set(starting)

    def count_restart(self, kind: ExitKind) -> None:
        """Counts a process that ended and is replaced."""
        self._restarts.labels(kind).inc()

    def remove_gauges(self, worker: int) -> None:
        """Removes the gauges of a worker whose process has ended; its counters remain."""
        mark_process_dead(worker, self._folder)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Stops listening."""
        self._endpoint.close()
