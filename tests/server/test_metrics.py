"""What a scraper reads over HTTP."""

import http.client
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.engine.observer import BatchReport
from server.engine.repository import FailedModel, Repository
from server.errors import BindError
from server.metrics import Metrics, MetricsServer
from tests.server.samples import CROSS, SELF, TEXT

HOST = "127.0.0.1"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def endpoint(metrics: Metrics) -> Iterator[MetricsServer]:
    endpoint = metrics.serve(HOST, 0)
    yield endpoint
    endpoint.close()


def scrape(port: int) -> Samples:
    """Every sample by its name and labels."""
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    assert response.status == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def test_models_are_shown_with_their_state_and_measured_error(
    metrics: Metrics, endpoint: MetricsServer, loaded: Repository
) -> None:
    metrics.loaded(Repository([*loaded, FailedModel(SELF, "2", "damaged")]))
    samples = scrape(endpoint.port)
    for name in (SELF, CROSS, TEXT):
        assert value(samples, "attention_model_ready", model=name, version="1") == 1
        labels = {"model": name, "version": "1", "provider": "CPUExecutionProvider"}
        assert value(samples, "attention_parity_max_abs_error", **labels) == loaded.ready(name).measured_error
    assert value(samples, "attention_model_ready", model=SELF, version="2") == 0
    errors = [name for name, _ in samples if name == "attention_parity_max_abs_error"]
    assert len(errors) == 3


def test_calls_are_counted_by_method_and_code(metrics: Metrics, endpoint: MetricsServer) -> None:
    for code, seconds in (("OK", 0.004), ("OK", 0.3), ("NOT_FOUND", 20.0)):
        metrics.called("/a/B", code, seconds)
    samples = scrape(endpoint.port)
    assert value(samples, "attention_requests_total", method="/a/B", code="OK") == 2
    assert value(samples, "attention_requests_total", method="/a/B", code="NOT_FOUND") == 1
    assert value(samples, "attention_request_seconds_count", method="/a/B") == 3
    assert value(samples, "attention_request_seconds_sum", method="/a/B") == pytest.approx(20.304)
    for bound, count in (("0.0025", 0), ("0.005", 1), ("10.0", 2), ("+Inf", 3)):
        assert value(samples, "attention_request_seconds_bucket", method="/a/B", le=bound) == count


def test_runs_are_shown_with_sequences_rows_padding_and_waits(
    metrics: Metrics, endpoint: MetricsServer
) -> None:
    metrics.batch_completed(
        BatchReport(model="m", sequences=3, tokens=10, padding=2, queue_seconds=[0.1, 0.2, 0.3], seconds=0.5)
    )
    metrics.batch_completed(
        BatchReport(model="m", sequences=1, tokens=5, padding=0, queue_seconds=[0.4], seconds=0.25)
    )
    samples = scrape(endpoint.port)
    expected = {
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


def test_two_servers_of_one_process_share_no_numbers(metrics: Metrics, endpoint: MetricsServer) -> None:
    Metrics().called("/a/B", "OK", 0.1)
    metrics.called("/a/B", "OK", 0.1)
    assert value(scrape(endpoint.port), "attention_requests_total", method="/a/B", code="OK") == 1


def test_a_taken_port_is_an_error(metrics: Metrics, endpoint: MetricsServer) -> None:
    with pytest.raises(BindError, match="in use"):
        metrics.serve(HOST, endpoint.port)


def test_a_closed_endpoint_listens_no_more(metrics: Metrics) -> None:
    endpoint = metrics.serve(HOST, 0)
    assert scrape(endpoint.port) is not None
    endpoint.close()
    with pytest.raises(ConnectionRefusedError):
        scrape(endpoint.port)
