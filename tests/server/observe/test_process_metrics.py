"""Metrics of the processes of a service, read from the system at every scrape."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from attention_serving.server.observe.prometheus import ProcessesCollector
from tests.server.observe.test_metrics import Samples, published, value

NAMES = {
    "process_cpu_seconds_total",
    "process_max_fds",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_virtual_memory_bytes",
}


def read(**processes: int) -> Samples:
    registry = CollectorRegistry()
    registry.register(ProcessesCollector(lambda: processes))
    return published(registry)


def test_each_process_has_its_own_values_until_it_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        samples = read(own=os.getpid(), other=other.pid)
        other.kill()
    assert {name for name, _ in samples} == NAMES
    assert {labels for _, labels in samples} == {frozenset({("process", name)}) for name in ("own", "other")}
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    assert value(samples, "process_open_fds", process="own") == pytest.approx(descriptors, abs=2)
    started = [value(samples, "process_start_time_seconds", process=name) for name in ("own", "other")]
    assert started[0] <= started[1] <= time.time() + 1
    spent = sum(os.times()[:2])
    assert value(samples, "process_cpu_seconds_total", process="own") == pytest.approx(spent, abs=1)
    left = read(own=os.getpid(), other=other.pid)
    assert {labels for _, labels in left} == {frozenset({("process", "own")})}
