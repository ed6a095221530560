"""The end of a pipeline whose collector is absent, slow or gone."""

import threading
from collections.abc import Iterator

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from server.tracing.export import Pipeline
from tests.support.collector import PATIENCE_SECONDS, QUICKLY, Collector, collecting


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUICKLY.items():
        monkeypatch.setenv(name, value)


def spans(name: str = "one") -> list[bytes]:
    return [Span(trace_id=bytes(15) + b"1", span_id=bytes(7) + b"1", name=name).SerializeToString()]


def closes(pipeline: Pipeline) -> bool:
    """Whether the pipeline closes although its collector does not answer."""
    closing = threading.Thread(target=pipeline.close, args=(0.1,), daemon=True)
    closing.start()
    closing.join(PATIENCE_SECONDS)
    return not closing.is_alive()


@pytest.fixture
def slow() -> Iterator[Collector]:
    with collecting() as collector:
        collector.held = threading.Event()
        yield collector


def test_what_is_queued_is_sent_before_the_end() -> None:
    with collecting() as collector:
        pipeline = Pipeline(collector.url)
        pipeline.add(spans)
        pipeline.close(PATIENCE_SECONDS)
        assert [span.name for span in collector.spans] == ["one"]


def test_a_slow_collector_delays_neither_calls_nor_the_end(slow: Collector) -> None:
    pipeline = Pipeline(slow.url)
    pipeline.add(spans)
    assert slow.exporting.wait(PATIENCE_SECONDS)
    for _ in range(10_000):  # more than the queue holds
        pipeline.add(spans)
    assert closes(pipeline)


def test_an_absent_collector_does_not_delay_the_end() -> None:
    pipeline = Pipeline("http://127.0.0.1:1")
    pipeline.add(spans)
    assert closes(pipeline)


def test_a_span_that_cannot_be_made_does_not_end_the_thread() -> None:
    def broken() -> list[bytes]:
        raise ValueError("a fault")

    with collecting() as collector:
        pipeline = Pipeline(collector.url)
        pipeline.add(broken)
        pipeline.add(lambda: spans("two"))
        pipeline.close(PATIENCE_SECONDS)
        assert [span.name for span in collector.spans] == ["two"]


def test_the_resource_takes_opentelemetrys_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    with collecting() as collector:
        pipeline = Pipeline(collector.url, role="http")
        pipeline.add(spans)
        pipeline.close(PATIENCE_SECONDS)
        (span,) = collector.spans
    assert span.resource["service.name"] == "mine"
    assert span.resource["deployment.environment.name"] == "test"
    assert span.resource["attention.process"] == "http"
