"""One endpoint for the metrics that several processes write."""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import values

from attention_serving.server.api.calls import CallLoad
from attention_serving.server.engine.statistics import EngineLoad
from attention_serving.server.gauges import FOLDER_VARIABLE
from attention_serving.server.metrics import Metrics
from attention_serving.server.workers.metrics import MultiprocessMetrics, write_to
from tests.server.test_metrics import HOST, scrape, value


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[MultiprocessMetrics]:
    endpoint = MultiprocessMetrics(tmp_path, HOST, 0)
    yield endpoint
    endpoint.close()


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Restores what `write_to` changes in the process."""
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))


def work(folder: Path, worker: int, *, calls: int, ready: int, error: float) -> None:
    """Does what a process does that starts as this worker, and counts that many calls."""
    write_to(folder, worker)
    metrics = Metrics()
    for _ in range(calls):
        metrics.call_ended("/a/B", "OK", 0.5)
    metrics._ready.labels("m", "1").set(ready)
    metrics._parity.labels("m", "1").set(error)
    metrics.flush()


def test_counts_add_up_over_workers_and_their_replacements(
    endpoint: MultiprocessMetrics, tmp_path: Path
) -> None:
    work(tmp_path, 0, calls=2, ready=1, error=0.1)
    work(tmp_path, 1, calls=3, ready=1, error=0.1)
    endpoint.remove_gauges(1)
    files = len(list(tmp_path.iterdir()))
    for _ in range(2):
        work(tmp_path, 1, calls=1, ready=1, error=0.1)
    samples = scrape(endpoint.port)
    assert value(samples, "attention_requests_total", method="/a/B", code="OK") == 7
    assert value(samples, "attention_request_seconds_count", method="/a/B") == 7
    assert value(samples, "attention_request_seconds_sum", method="/a/B") == pytest.approx(3.5)
    # The three kinds of gauges again, and no file for each further process.
    assert len(list(tmp_path.iterdir())) == files + 3


def test_gauges_show_the_worst_worker(endpoint: MultiprocessMetrics, tmp_path: Path) -> None:
    work(tmp_path, 0, calls=0, ready=1, error=0.25)
    work(tmp_path, 1, calls=0, ready=0, error=0.5)
    samples = scrape(endpoint.port)
    assert value(samples, "attention_model_ready", model="m", version="1") == 0
    assert value(samples, "attention_parity_error", model="m", version="1") == 0.5
    endpoint.remove_gauges(1)
    samples = scrape(endpoint.port)
    assert value(samples, "attention_model_ready", model="m", version="1") == 1
    assert value(samples, "attention_parity_error", model="m", version="1") == 0.25


def test_loads_add_up_and_waiting_times_show_the_worst_worker(
    endpoint: MultiprocessMetrics, tmp_path: Path
) -> None:
    for worker, (calls, seconds) in enumerate([(2, 0.5), (3, 0.25)]):
        write_to(tmp_path, worker)
        metrics = Metrics()
        load = EngineLoad(queued_sequences=calls, oldest_seconds=seconds, predicted_seconds=2 * seconds)
        metrics.watch(partial(replace, load), partial(CallLoad, calls=calls))
        metrics.refresh()
    samples = scrape(endpoint.port)
    assert value(samples, "attention_open_calls") == 5
    assert value(samples, "attention_queue_depth") == 5
    assert value(samples, "attention_queue_age_seconds") == 0.5
    assert value(samples, "attention_predicted_queue_seconds") == 1.0
    endpoint.remove_gauges(0)
    assert value(scrape(endpoint.port), "attention_open_calls") == 3


def test_workers_are_counted_by_state(endpoint: MultiprocessMetrics) -> None:
    endpoint.count(ready=3, starting=1)
    samples = scrape(endpoint.port)
    assert value(samples, "attention_workers", state="ready") == 3
    assert value(samples, "attention_workers", state="starting") == 1


def test_the_processes_are_published_by_name(endpoint: MultiprocessMetrics) -> None:
    assert [name for name, _ in scrape(endpoint.port) if name.startswith("process_")] == []
    endpoint.watch(lambda: {"supervisor": os.getpid(), "worker-0": os.getppid()})
    samples = scrape(endpoint.port)
    for process in ("supervisor", "worker-0"):
        assert value(samples, "process_resident_memory_bytes", process=process) > 0


def test_a_file_that_is_being_created_is_skipped(endpoint: MultiprocessMetrics, tmp_path: Path) -> None:
    work(tmp_path, 0, calls=2, ready=1, error=0.1)
    (tmp_path / "counter_1.db").touch()
    assert value(scrape(endpoint.port), "attention_requests_total", method="/a/B", code="OK") == 2
