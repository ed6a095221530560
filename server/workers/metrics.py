"""Metrics of several worker processes: each writes its own to files, one endpoint shows their sum."""

import os
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, Metric, values
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from server.metrics import MetricsServer

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def write_to(folder: Path, worker: int) -> None:
    """Makes this process write its metrics to files of a folder. Comes before the first metric.

    The files are named by the worker's number and not, as by default, by the process: one that takes the
    place of another goes on with its counts, and restarts leave no files behind.
    """
    os.environ[FOLDER_VARIABLE] = str(folder)
    values.ValueClass = values.MultiProcessValue(lambda: worker)  # type: ignore[no-untyped-call]


class _Collector(MultiProcessCollector):
    """Passes over files that a worker is making: they are empty at first, which the library cannot read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(None, str(folder))  # type: ignore[no-untyped-call]
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        """The sum of all that is written."""
        files = [str(file) for file in self._folder.glob("*.db") if _is_written(file)]
        return self.merge(files)  # type: ignore[no-untyped-call,no-any-return]


def _is_written(file: Path) -> bool:
    try:
        return file.stat().st_size > 0
    except FileNotFoundError:  # its worker has just ended
        return False


class FleetMetrics:
    """The endpoint of all workers; listens until it is closed."""

    def __init__(self, folder: Path, host: str, port: int) -> None:
        """Listens.

        Raises:
            BindError: The address is taken or is none of this machine's.
        """
        self._folder = str(folder)
        registry = CollectorRegistry()
        registry.register(_Collector(folder))
        self._workers = Gauge(
            "attention_workers",
            "Worker processes by state.",
            ["state"],
            registry=registry,
        )
        self._endpoint = MetricsServer(registry, host, port)
        self.port = self._endpoint.port

    def count(self, *, ready: int, starting: int) -> None:
        """Publishes how many workers are in each state."""
        self._workers.labels("ready").set(ready)
        self._workers.labels("starting").set(starting)

    def ended(self, worker: int) -> None:
        """Forgets the gauges of a worker whose process has ended; what it counted stays counted."""
        mark_process_dead(worker, self._folder)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Stops listening."""
        self._endpoint.close()
