"""The metrics that several processes write, added up."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, values
from prometheus_client.multiprocess import mark_process_dead

from attention_serving.server.api.calls import CallLoad
from attention_serving.server.engine.statistics import EngineLoad
from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.observe.prometheus import FOLDER_VARIABLE
from attention_serving.server.workers import worker_registry, write_metrics_to
from tests.server.observe.test_metrics import published, value


@pytest.fixture
def registry(tmp_path: Path) -> CollectorRegistry:
    return worker_registry(tmp_path)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Restores what `write_metrics_to` changes in the process."""
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))


def work(folder: Path, worker: int, *, calls: int, ready: int, error: float) -> None:
    """Does what a process does that starts as this worker, and counts that many calls."""
    write_metrics_to(folder, worker)
    metrics = Metrics()
    for _ in range(calls):
        metrics.call_ended("/a/B", "OK", 0.5)
    metrics._ready.labels("m", "1").set(ready)
    metrics._parity.labels("m", "1").set(error)
    metrics.refresh()


def test_counts_add_up_over_workers_and_their_replacements(
    registry: CollectorRegistry, tmp_path: Path
) -> None:
    work(tmp_path, 0, calls=2, ready=1, error=0.1)
    work(tmp_path, 1, calls=3, ready=1, error=0.1)
    mark_process_dead(1, str(tmp_path))  # type: ignore[no-untyped-call]
    files = len(list(tmp_path.iterdir()))
    for _ in range(2):
        work(tmp_path, 1, calls=1, ready=1, error=0.1)
    samples = published(registry)
    assert value(samples, "attention_requests_total", method="/a/B", code="OK") == 7
    assert value(samples, "attention_request_seconds_count", method="/a/B") == 7
    assert value(samples, "attention_request_seconds_sum", method="/a/B") == pytest.approx(3.5)
    # The three kinds of gauges again, and no file for each further process.
    assert len(list(tmp_path.iterdir())) == files + 3


def test_gauges_show_the_worst_worker(registry: CollectorRegistry, tmp_path: Path) -> None:
    work(tmp_path, 0, calls=0, ready=1, error=0.25)
    work(tmp_path, 1, calls=0, ready=0, error=0.5)
    samples = published(registry)
    assert value(samples, "attention_model_ready", model="m", version="1") == 0
    assert value(samples, "attention_parity_error", model="m", version="1") == 0.5
    mark_process_dead(1, str(tmp_path))  # type: ignore[no-untyped-call]
    samples = published(registry)
    assert value(samples, "attention_model_ready", model="m", version="1") == 1
    assert value(samples, "attention_parity_error", model="m", version="1") == 0.25


def test_loads_add_up_and_waiting_times_show_the_worst_worker(
    registry: CollectorRegistry, tmp_path: Path
) -> None:
    for worker, (calls, seconds) in enumerate([(2, 0.5), (3, 0.25)]):
        write_metrics_to(tmp_path, worker)
        metrics = Metrics()
        load = EngineLoad(queued_sequences=calls, oldest_seconds=seconds, predicted_seconds=2 * seconds)
        metrics.watch(partial(replace, load), partial(CallLoad, calls=calls))
        metrics.refresh()
    samples = published(registry)
    assert value(samples, "attention_open_calls") == 5
    assert value(samples, "attention_queue_depth") == 5
    assert value(samples, "attention_queue_age_seconds") == 0.5
    assert value(samples, "attention_predicted_queue_seconds") == 1.0
    mark_process_dead(0, str(tmp_path))  # type: ignore[no-untyped-call]
    assert value(published(registry), "attention_open_calls") == 3


def test_a_file_that_is_being_created_is_skipped(registry: CollectorRegistry, tmp_path: Path) -> None:
    work(tmp_path, 0, calls=2, ready=1, error=0.1)
    (tmp_path / "counter_1.db").touch()
    assert value(published(registry), "attention_requests_total", method="/a/B", code="OK") == 2
