"""Published metrics, and the endpoint that serves them."""

import http.client
import platform
from importlib.metadata import distributions
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ByteSize

from attention_serving.server import VERSION
from attention_serving.server.api.calls import CallLoad
from attention_serving.server.engine.errors import Code
from attention_serving.server.engine.limits import MIB
from attention_serving.server.engine.models.control import ChangeKind, ModelChange
from attention_serving.server.engine.models.repository import FailedModel, Repository
from attention_serving.server.engine.run.provider import Provider
from attention_serving.server.engine.statistics import BatchReport, EngineLoad, ExpiryStage, RunTimes
from attention_serving.server.errors import BindError
from attention_serving.server.observe.metrics import UNKNOWN, Metrics
from attention_serving.server.observe.prometheus import MetricsEndpoint
from attention_serving.server.settings import Settings
from tests.server.samples import CROSS, SELF, TEXT

HOST = "127.0.0.1"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

TIMES = RunTimes(prepare=0.125, compute=0.25, split=0.125)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def scrape(port: int) -> Samples:
    """Every sample of an endpoint, by name and labels."""
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    assert response.status == 200
    return parse(body)


def counted(metrics: Metrics) -> Samples:
    """The same without HTTP, once what was counted is published."""
    metrics.refresh()
    return published(metrics.registry)


def published(registry: CollectorRegistry) -> Samples:
    """The same of a registry."""
    return parse(generate_latest(registry).decode())


def parse(body: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def test_models_are_published_with_state_and_measured_error(metrics: Metrics, loaded: Repository) -> None:
    metrics.loading([(SELF, "1"), (SELF, "2")])
    assert value(counted(metrics), "attention_model_ready", model=SELF, version="1") == 0
    metrics.loaded(Repository([*loaded, FailedModel(SELF, "2", "damaged")]))
    samples = counted(metrics)
    for name in (SELF, CROSS, TEXT):
        assert value(samples, "attention_model_ready", model=name, version="1") == 1
        assert value(samples, "attention_model_failed", model=name, version="1") == 0
        model, labels = loaded.ready(name), {"model": name, "version": "1"}
        assert value(samples, "attention_parity_error", **labels) == model.measured_error
        assert value(samples, "attention_parity_tolerance", **labels) == model.manifest.tolerance.atol > 0
    assert value(samples, "attention_model_ready", model=SELF, version="2") == 0
    assert value(samples, "attention_model_failed", model=SELF, version="2") == 1
    assert len([name for name, _ in samples if name == "attention_parity_error"]) == 3


def test_a_model_that_is_gone_is_neither_ready_nor_failed(metrics: Metrics) -> None:
    metrics.loaded(Repository([FailedModel(SELF, "2", "damaged")]))
    metrics.loaded(Repository([]))
    samples = counted(metrics)
    assert value(samples, "attention_model_ready", model=SELF, version="2") == 0
    assert value(samples, "attention_model_failed", model=SELF, version="2") == 0


def test_changes_of_models_are_counted_by_result(metrics: Metrics) -> None:
    for kind, succeeded in (
        (ChangeKind.LOAD, True),
        (ChangeKind.REPLACE, True),
        (ChangeKind.REPLACE, False),
        (ChangeKind.REPLACE, False),
    ):
        metrics.model_changed(ModelChange("m", kind, succeeded))
    samples, name = counted(metrics), "attention_model_changes_total"
    assert value(samples, name, model="m", change="load", result="ok") == 1
    assert value(samples, name, model="m", change="replace", result="ok") == 1
    assert value(samples, name, model="m", change="replace", result="failed") == 2


def test_requests_are_counted_by_model_and_code(metrics: Metrics) -> None:
    for model, answered in (("m", [0.00005, 0.0002, 20.0]), ("n", [0.3])):
        metrics.batch_completed(BatchReport(model, 1, 0, [0.0], TIMES, answered))
    metrics.request_failed("m", Code.RESOURCE_EXHAUSTED)
    samples = counted(metrics)
    assert value(samples, "attention_model_requests_total", model="m", code="OK") == 3
    assert value(samples, "attention_model_requests_total", model="n", code="OK") == 1
    assert value(samples, "attention_model_requests_total", model="m", code="RESOURCE_EXHAUSTED") == 1
    for bound, count in (("0.0001", 1), ("0.00025", 2), ("10.0", 2), ("+Inf", 3)):
        assert value(samples, "attention_model_request_seconds_bucket", model="m", le=bound) == count


def test_calls_are_counted_by_method_and_code(metrics: Metrics) -> None:
    for code, seconds in (("OK", 0.004), ("OK", 0.3), ("NOT_FOUND", 20.0)):
        metrics.call_ended("/a/B", code, seconds)
    samples = counted(metrics)
    assert value(samples, "attention_requests_total", method="/a/B", code="OK") == 2
    assert value(samples, "attention_requests_total", method="/a/B", code="NOT_FOUND") == 1
    assert value(samples, "attention_request_seconds_count", method="/a/B") == 3
    assert value(samples, "attention_request_seconds_sum", method="/a/B") == pytest.approx(20.304)
    for bound, count in (("0.0025", 0), ("0.005", 1), ("10.0", 2), ("+Inf", 3)):
        assert value(samples, "attention_request_seconds_bucket", method="/a/B", le=bound) == count


def test_batches_are_published_with_sequences_rows_padding_and_queue_times(metrics: Metrics) -> None:
    metrics.batch_completed(
        BatchReport("m", tokens=10, padding=2, queue_seconds=[0.1, 0.2, 0.3], times=TIMES, answered=[])
    )
    metrics.batch_completed(
        BatchReport("m", tokens=5, padding=0, queue_seconds=[0.4], times=RunTimes(0, 0.25, 0), answered=[])
    )
    samples = counted(metrics)
    expected = {
        "attention_sequences_total": 4,
        "attention_tokens_total": 15,
        "attention_padding_tokens_total": 2,
        "attention_batch_sequences_count": 2,
        "attention_batch_sequences_sum": 4,
        "attention_batch_seconds_sum": 0.75,
        "attention_queue_seconds_count": 4,
        "attention_queue_seconds_sum": 1.0,
    }
    found = {name: value(samples, name, model="m") for name in expected}
    assert found == pytest.approx(expected)


def test_two_servers_in_one_process_count_separately(metrics: Metrics) -> None:
    Metrics().call_ended("/a/B", "OK", 0.1)
    metrics.call_ended("/a/B", "OK", 0.1)
    assert value(counted(metrics), "attention_requests_total", method="/a/B", code="OK") == 1


def test_refusals_expiries_cut_readers_and_terminated_runs_are_counted(metrics: Metrics) -> None:
    for reason in ("OVERLOADED", "OVERLOADED", "LIMIT_EXCEEDED"):
        metrics.refused("/a/B", reason)
    metrics.request_expired("m", ExpiryStage.QUEUED)
    metrics.request_expired("m", ExpiryStage.RUNNING)
    metrics.request_expired("m", ExpiryStage.RUNNING)
    metrics.reader_cut("/a/B")
    metrics.run_terminated("m")
    samples = counted(metrics)
    assert value(samples, "attention_refused_requests_total", reason="OVERLOADED") == 2
    assert value(samples, "attention_refused_requests_total", reason="LIMIT_EXCEEDED") == 1
    assert value(samples, "attention_expired_requests_total", model="m", stage="queued") == 1
    assert value(samples, "attention_expired_requests_total", model="m", stage="running") == 2
    assert value(samples, "attention_cut_readers_total", method="/a/B") == 1
    assert value(samples, "attention_terminated_runs_total", model="m") == 1


ENGINE_LOAD = EngineLoad(
    queued_sequences=7,
    oldest_seconds=0.5,
    predicted_seconds=1.5,
    in_flight_bytes=2048,
    run_bytes=4096,
    running=2,
)
CALL_LOAD = CallLoad(calls=9, streams=3)
LOAD = {
    "attention_queue_depth": 7,
    "attention_queue_age_seconds": 0.5,
    "attention_predicted_queue_seconds": 1.5,
    "attention_in_flight_bytes": 2048,
    "attention_run_memory_bytes": 4096,
    "attention_runs": 2,
    "attention_open_calls": 9,
    "attention_open_streams": 3,
}


def test_the_load_is_published_when_it_is_refreshed(metrics: Metrics) -> None:
    metrics.refresh()
    assert {name: value(counted(metrics), name) for name in LOAD} == dict.fromkeys(LOAD, 0)
    metrics.watch(lambda: ENGINE_LOAD, lambda: CALL_LOAD)
    metrics.refresh()
    assert {name: value(counted(metrics), name) for name in LOAD} == LOAD


def test_every_scrape_reads_the_load_of_its_moment(metrics: Metrics) -> None:
    endpoint = MetricsEndpoint(metrics.registry, HOST, 0, metrics.refresh)
    loads = iter([CallLoad(calls=1), CallLoad(calls=2)])
    metrics.watch(EngineLoad, lambda: next(loads))
    assert [value(scrape(endpoint.port), "attention_open_calls") for _ in range(2)] == [1, 2]
    endpoint.close()


def test_an_endpoint_serves_the_metrics_until_it_is_closed(metrics: Metrics) -> None:
    endpoint = MetricsEndpoint(metrics.registry, HOST, 0, metrics.refresh)
    metrics.call_ended("/a/B", "OK", 0.1)
    assert scrape(endpoint.port) == counted(metrics)
    with pytest.raises(BindError, match=rf"cannot listen on {HOST}:{endpoint.port} for metrics: .*in use"):
        MetricsEndpoint(metrics.registry, HOST, endpoint.port)
    endpoint.close()
    with pytest.raises(ConnectionRefusedError):
        scrape(endpoint.port)


def fixed(**options: object) -> Samples:
    metrics = Metrics()
    metrics.configured(Settings.model_validate({"model_repository": Path(), **options}))
    return counted(metrics)


def build_labels(samples: Samples) -> dict[str, str]:
    (labels,) = [labels for name, labels in samples if name == "attention_build_info"]
    return dict(labels)


@pytest.mark.parametrize("provider", Provider, ids=str)
def test_the_build_is_described(provider: Provider) -> None:
    """One of the two runtimes is installed, never both."""
    installed = {each.name: each.version for each in distributions()}
    samples = fixed(provider=provider)
    labels = build_labels(samples)
    assert labels == {
        "version": VERSION,
        "provider": provider.runtime.name,
        "onnxruntime": installed.get(provider.runtime.package, UNKNOWN),
        "grpcio": installed["grpcio"],
        "python": platform.python_version(),
    }
    assert value(samples, "attention_build_info", **labels) == 1


@pytest.mark.parametrize(
    ("metric", "option", "given", "expected"),
    [
        ("attention_open_calls_limit", "max_concurrent_calls", 7, 7),
        ("attention_open_connections_limit", "max_connections", 9, 9),
        ("attention_batch_sequences_limit", "max_batch_sequences", 5, 5),
        ("attention_in_flight_limit_bytes", "max_in_flight_bytes", ByteSize(8 * MIB), 8 * MIB),
        ("attention_run_memory_limit_bytes", "max_memory", ByteSize(80 * MIB), 60 * MIB),
    ],
)
def test_the_limits_are_those_of_the_settings(
    metric: str, option: str, given: object, expected: float
) -> None:
    assert value(fixed(**{option: given}), metric) == expected
