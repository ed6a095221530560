"""The metrics of several processes as one: each writes files, which another adds up at every scrape."""

import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, Metric, disable_created_metrics, values
from prometheus_client.multiprocess import MultiProcessCollector

# In the files of several processes, from which the library cannot remove a value. It is the least of all: the
# value of another process takes its place in a maximum, and none in a minimum.
NO_VALUE = -math.inf
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def forget(gauge: Gauge, *labels: str) -> None:
    """Removes the value of these labels, if there is one; also if several processes publish it together."""
    if FOLDER_VARIABLE in os.environ:
        gauge.labels(*labels).set(NO_VALUE)
    else:
        gauge.remove(*labels)


def write_metrics_to(folder: Path, worker: int) -> None:
    """Makes this process write its metrics to files in a folder. Call it before the first metric is created.

    The files are named after the number of the worker, not after the process as by default: a replacement
    continues the counts of its predecessor, and restarts do not leave files behind.
    """
    os.environ[FOLDER_VARIABLE] = str(folder)
    values.ValueClass = values.MultiProcessValue(lambda: worker)  # type: ignore[no-untyped-call]


def worker_registry(folder: Path) -> CollectorRegistry:
    """The metrics of all workers that write to a folder, added up."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    registry.register(_Collector(folder))
    return registry


class _Collector(MultiProcessCollector):
    """Skips values that were removed, and files that a worker is creating, which the library cannot read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(None, str(folder))  # type: ignore[no-untyped-call]
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        """The aggregate of all files."""
        files = []
        for file in self._folder.glob("*.db"):
            with suppress(FileNotFoundError):  # its worker has just ended
                files += [str(file)] if file.stat().st_size else []
        for metric in self.merge(files):  # type: ignore[no-untyped-call]
            metric.samples = [sample for sample in metric.samples if sample.value != NO_VALUE]
            yield metric
