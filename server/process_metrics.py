"""Processor time, memory, descriptors and start times of the processes that form one service."""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from prometheus_client import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

PROCESS = "process"
MOST_PROCESSES = 2048
# Process ids by the name of the process, such as `worker-0`.
Processes = Callable[[], Mapping[str, int]]


class ProcessesCollector(Collector):
    """Reads each process at every scrape: Prometheus' `process_*` metrics with the label `process`.

    They are not added up: pages that processes share, such as those of one weights file, count in the
    resident memory of each.
    """

    def __init__(self, processes: Processes) -> None:
        """Reads nothing yet.

        Args:
            processes: The processes of the service. Called at every scrape, on any thread.
        """
        self._processes = processes

    def describe(self) -> Iterable[Metric]:
        """Names of the metrics, which a client may ask for."""
        return _read(os.getpid())

    def collect(self) -> Iterable[Metric]:
        """The metrics of every process that is running."""
        families = dict[str, Metric]()
        for name, pid in self._processes().items():
            for own in _read(pid):
                family = families.setdefault(own.name, Metric(own.name, own.documentation, own.type))
                for sample in own.samples:
                    family.add_sample(sample.name, {PROCESS: name}, sample.value)
        return families.values()


def _read(pid: int) -> Iterable[Metric]:
    """The metrics of one process; those that can be read."""
    return _collector(pid).collect()


@lru_cache(MOST_PROCESSES)
def _collector(pid: int) -> ProcessCollector:
    """Kept, so that the start of a process is always computed from the same start of the machine."""
    return ProcessCollector(pid=lambda: pid, registry=None)
