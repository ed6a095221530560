"""Published metrics: what is counted, what is read at a scrape, and how it is named."""

import dataclasses
import os
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from attention_serving.server import VERSION
from attention_serving.server.api.calls import CallLoad
from attention_serving.server.engine.errors import Code
from attention_serving.server.engine.events import (
    CallEvent,
    EngineLoad,
    ExpiryStage,
    FailureEvent,
    ModelStatistics,
    RefusalEvent,
    RunEvent,
    TerminationEvent,
)
from attention_serving.server.engine.limits import MIB
from attention_serving.server.engine.models.control import ChangeKind
from attention_serving.server.engine.models.repository import FailedModel, Repository
from attention_serving.server.engine.run.driver import Gpu
from attention_serving.server.observe.metrics import UNKNOWN, Metrics
from attention_serving.server.observe.prometheus import BulkHistogram, MetricsEndpoint, ProcessesCollector
from attention_serving.server.settings import Settings
from tests.server.samples import CROSS, SELF, TEXT
from tests.support.prometheus import published, scrape, shows, value

HOST = "127.0.0.1"


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def has(metrics: Metrics, expected: str) -> bool:
    """Whether these samples are published once the metrics are refreshed."""
    metrics.refresh()
    return shows(metrics.registry, expected)


def test_models_are_published_with_state_and_measured_error(metrics: Metrics, loaded: Repository) -> None:
    metrics.loading([(SELF, "1"), (SELF, "2")])
    assert has(metrics, f'attention_model_ready{{model="{SELF}",version="1"}} 0')
    metrics.loaded(Repository([*loaded, FailedModel(SELF, "2", "damaged")]))
    for name in (SELF, CROSS, TEXT):
        model = loaded.ready(name)
        assert has(
            metrics,
            f"""
            attention_model_ready{{model="{name}",version="1"}} 1
            attention_model_failed{{model="{name}",version="1"}} 0
            attention_parity_error{{model="{name}",version="1"}} {model.measured_error}
            attention_parity_tolerance{{model="{name}",version="1"}} {model.manifest.tolerance.atol}
            attention_model_changes_total{{model="{name}",change="replace",result="failed"}} 0
            attention_expired_requests_total{{model="{name}",stage="running"}} 0
            attention_terminated_runs_total{{model="{name}"}} 0
            """,
        )
    second = f'{{model="{SELF}",version="2"}}'
    assert has(metrics, f"attention_model_ready{second} 0\nattention_model_failed{second} 1")
    metrics.loaded(loaded)
    assert has(metrics, f"attention_model_ready{second} 0\nattention_model_failed{second} 0")


def test_calls_requests_and_batches_are_counted(metrics: Metrics) -> None:
    for code, seconds in (("OK", 0.004), ("OK", 0.25), ("NOT_FOUND", 20.0)):
        metrics.events.add(CallEvent("/a/B", code, seconds))
    model = ("m", "1", "fp32", ModelStatistics(), "plain")
    queued_at, answered = [0.875, 0.75, 0.5], [0.00005, 0.0002, 20.0]
    metrics.events.add(RunEvent(*model, 10, 2, 1.0, 1.125, 1.375, 1.5, queued_at, answered))
    metrics.events.add(RunEvent(*model, 5, 0, 1.0, 1.0, 1.25, 1.25, [0.875], []))
    metrics.events.add(FailureEvent("m", Code.RESOURCE_EXHAUSTED))
    assert has(
        metrics,
        """
        attention_requests_total{method="/a/B",code="OK"} 2
        attention_requests_total{method="/a/B",code="NOT_FOUND"} 1
        attention_request_seconds_sum{method="/a/B"} 20.254
        attention_request_seconds_bucket{method="/a/B",le="0.0025"} 0
        attention_request_seconds_bucket{method="/a/B",le="0.005"} 1
        attention_request_seconds_bucket{method="/a/B",le="10.0"} 2
        attention_request_seconds_bucket{method="/a/B",le="+Inf"} 3
        attention_model_requests_total{model="m",code="OK"} 3
        attention_model_requests_total{model="m",code="RESOURCE_EXHAUSTED"} 1
        attention_model_request_seconds_bucket{model="m",le="0.0001"} 1
        attention_model_request_seconds_bucket{model="m",le="+Inf"} 3
        attention_sequences_total{model="m"} 4
        attention_tokens_total{model="m"} 15
        attention_padding_tokens_total{model="m"} 2
        attention_batch_sequences_count{model="m"} 2
        attention_batch_sequences_sum{model="m"} 4
        attention_batch_seconds_sum{model="m"} 0.75
        attention_queue_seconds_count{model="m"} 4
        attention_queue_seconds_sum{model="m"} 1
        """,
    )


def test_what_is_rare_is_counted(metrics: Metrics) -> None:
    metrics.model_changed("m", ChangeKind.REPLACE, succeeded=True)
    metrics.model_changed("m", ChangeKind.LOAD, succeeded=False)
    for _ in range(2):
        metrics.events.add(RefusalEvent("OVERLOADED"))
    metrics.events.add(FailureEvent("m", "DEADLINE_EXCEEDED", stage=ExpiryStage.QUEUED))
    metrics.events.add(TerminationEvent("m"))
    metrics.reloaded("tokens", object())
    metrics.reloaded("tokens", None)
    metrics.reloaded("certificates", None)
    assert has(
        metrics,
        """
        attention_model_changes_total{model="m",change="replace",result="ok"} 1
        attention_model_changes_total{model="m",change="load",result="failed"} 1
        attention_refused_requests_total{reason="OVERLOADED"} 2
        attention_expired_requests_total{model="m",stage="queued"} 1
        attention_terminated_runs_total{model="m"} 1
        attention_security_reloads_total{what="tokens",result="success"} 1
        attention_security_reloads_total{what="tokens",result="failure"} 1
        attention_security_reloads_total{what="certificates",result="failure"} 1
        """,
    )
    assert not any(number for (name, _), number in published(Metrics().registry).items() if "_total" in name)


def test_every_scrape_reads_the_load_of_its_moment(metrics: Metrics) -> None:
    assert has(metrics, "attention_queue_depth 0\nattention_open_calls 0")
    engine = {field.name: number for number, field in enumerate(dataclasses.fields(EngineLoad), 1)}
    calls = {field.name: number for number, field in enumerate(dataclasses.fields(CallLoad), 100)}
    metrics.watch(lambda: EngineLoad(**engine), lambda: CallLoad(**calls))
    endpoint = MetricsEndpoint(metrics.registry, HOST, 0, metrics.refresh)
    samples = scrape(endpoint.port)
    endpoint.close()
    published = {
        name.removeprefix("attention_").removesuffix("_total"): number
        for (name, labels), number in samples.items()
        if not labels and number and "_created" not in name
    }
    assert published == engine | calls


def test_limits_and_build_are_described(metrics: Metrics) -> None:
    given = {"max_concurrent_calls": 7, "max_connections": 9, "max_batch_sequences": 5, "provider": "cuda"}
    memory = {"max_in_flight_bytes": 8 * MIB, "max_context_bytes": 2 * MIB, "max_memory": 80 * MIB}
    settings = Settings.model_validate({"model_repository": Path(), **given, **memory})
    metrics.configured(settings, Gpu("NVIDIA H100", "GPU-5"))
    installed = {each.name: each.version for each in distributions()}
    version = installed.get("onnxruntime-gpu", UNKNOWN)  # one of the two runtimes is installed, never both
    assert has(
        metrics,
        f"""
        attention_open_calls_limit 7
        attention_open_connections_limit 9
        attention_batch_sequences_limit 5
        attention_in_flight_limit_bytes {8 * MIB}
        attention_context_limit_bytes {2 * MIB}
        attention_run_memory_limit_bytes {70 * MIB}
        attention_device_processes{{name="NVIDIA H100",uuid="GPU-5"}} 1
        attention_build_info{{version="{VERSION}",provider="CUDAExecutionProvider",onnxruntime="{version}"}} 1
        """,
    )


def test_each_process_has_its_own_values_until_it_ends() -> None:
    registry = CollectorRegistry()
    pids: dict[str, int | None] = {"own": os.getpid(), "other": None}
    registry.register(ProcessesCollector(lambda: pids))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        pids["other"] = other.pid
        samples = published(registry)
        other.kill()
    pids["other"] = None
    started = [value(samples, "process_start_time_seconds", process=name) for name in ("own", "other")]
    assert started[0] <= started[1] <= time.time() + 1
    spent = value(samples, "process_cpu_seconds_total", process="own")
    assert spent == pytest.approx(sum(os.times()[:2]), abs=1)
    assert len(samples) == 2 * 6
    assert published(registry).keys() == {key for key in samples if ("process", "own") in key[1]}


BUCKETS = (0.1, 1.0, 2.5)
# On a bound, beside it, above all bounds.
VALUES = st.lists(st.one_of(st.sampled_from((0.0, *BUCKETS, 100.0)), st.floats(0, 10)), max_size=40)


@given(st.lists(VALUES, max_size=4))
def test_the_samples_of_bulk_histograms_are_those_of_the_library(parts: list[list[float]]) -> None:
    ours, library = CollectorRegistry(), CollectorRegistry()
    bulk = BulkHistogram("seconds", "Help.", ["label"], buckets=BUCKETS, registry=ours).labels("a")
    plain = Histogram("seconds", "Help.", ["label"], buckets=BUCKETS, registry=library).labels("a")
    for part in parts:
        bulk.observe_all(part)
        for each in part:
            plain.observe(each)
    assert published(ours) == pytest.approx(published(library))  # sums are rounded in another order
