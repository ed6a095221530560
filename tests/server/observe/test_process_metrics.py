"""Metrics of the processes of a service, read from the system at every scrape."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
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


@pytest.fixture
def other() -> Iterator["subprocess.Popen[bytes]"]:
    """Another process, which waits until its input ends."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def read(**processes: int) -> Samples:
    registry = CollectorRegistry()
    registry.register(ProcessesCollector(lambda: processes))
    return published(registry)


def test_each_process_has_its_own_values(other: "subprocess.Popen[bytes]") -> None:
    samples = read(own=os.getpid(), other=other.pid)
    assert {name for name, _ in samples} == NAMES
    assert {labels for _, labels in samples} == {frozenset({("process", name)}) for name in ("own", "other")}
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    assert value(samples, "process_open_fds", process="own") == pytest.approx(descriptors, abs=2)
    started = {name: value(samples, "process_start_time_seconds", process=name) for name in ("own", "other")}
    assert started["own"] <= started["other"] <= time.time() + 1
    spent = sum(os.times()[:2])
    assert value(samples, "process_cpu_seconds_total", process="own") == pytest.approx(spent, abs=1)


def test_a_process_that_has_ended_is_left_out(other: "subprocess.Popen[bytes]") -> None:
    other.kill()
    other.wait()
    samples = read(own=os.getpid(), other=other.pid)
    assert {labels for _, labels in samples} == {frozenset({("process", "own")})}
