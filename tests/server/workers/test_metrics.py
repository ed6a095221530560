"""The metrics that several processes write, added up."""

from pathlib import Path

import pytest
from prometheus_client import values
from prometheus_client.multiprocess import mark_process_dead

from attention_serving.server.api.calls import CallLoad
from attention_serving.server.engine.statistics import EngineLoad
from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.observe.prometheus import FOLDER_VARIABLE, worker_registry, write_metrics_to
from tests.support.prometheus import shows


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Restores what `write_metrics_to` changes in the process."""
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))


def work(folder: Path, worker: int, *, calls: int, is_ready: bool) -> None:
    """Does what a process does that starts as this worker, counts calls, and publishes its load."""
    write_metrics_to(folder, worker)
    metrics = Metrics()
    for _ in range(calls):
        metrics.call_ended("/a/B", "OK", 0.5)
    if not is_ready:
        metrics.loading([("m", "1")])
    load = EngineLoad(queue_depth=calls, queue_age_seconds=calls / 4)
    metrics.watch(lambda: load, lambda: CallLoad(open_calls=calls))
    metrics.refresh()


def test_counts_and_loads_add_up_and_other_gauges_show_the_worst_worker(tmp_path: Path) -> None:
    work(tmp_path, 0, calls=2, is_ready=True)
    work(tmp_path, 1, calls=3, is_ready=False)
    assert shows(
        worker_registry(tmp_path),
        """
        attention_requests_total{method="/a/B",code="OK"} 5
        attention_request_seconds_count{method="/a/B"} 5
        attention_request_seconds_sum{method="/a/B"} 2.5
        attention_queue_depth 5
        attention_open_calls 5
        attention_queue_age_seconds 0.75
        attention_model_ready{model="m",version="1"} 0
        """,
    )
    files = len(list(tmp_path.iterdir()))
    mark_process_dead(1, str(tmp_path))  # type: ignore[no-untyped-call]
    assert shows(worker_registry(tmp_path), "attention_open_calls 2\nattention_queue_age_seconds 0.5")
    for _ in range(2):  # replacements of it, which go on with its counts and its files
        work(tmp_path, 1, calls=1, is_ready=True)
    assert shows(
        worker_registry(tmp_path),
        """
        attention_requests_total{method="/a/B",code="OK"} 7
        attention_request_seconds_sum{method="/a/B"} 3.5
        attention_open_calls 3
        """,
    )
    assert len(list(tmp_path.iterdir())) <= files
