"""The end of a pipeline whose collector is absent, slow or gone."""

import threading
from collections.abc import Iterator

import pytest

from attention_serving.server.tracing.export import GROUP, Pipeline
from attention_serving.server.tracing.messages import SpanTemplate
from tests.support.collector import PATIENCE_SECONDS, QUICKLY, Collector, collecting

ADDED = 400  # by each of four threads: fewer than the queue holds


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUICKLY.items():
        monkeypatch.setenv(name, value)


def spans(name: str = "one") -> bytes:
    return SpanTemplate(name).filled(b"1" * 16, b"1" * 8, b"", 1, 2)


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


@pytest.mark.parametrize("before", [1, GROUP - 2, GROUP, 3 * GROUP + 1])
def test_a_span_that_cannot_be_made_costs_no_others(before: int) -> None:
    def broken() -> bytes:
        raise ValueError("a fault")

    with collecting() as collector:
        pipeline = Pipeline(collector.url)
        for _ in range(before):
            pipeline.add(spans)
        pipeline.add(broken)
        pipeline.add(lambda: spans("two"))
        pipeline.close(PATIENCE_SECONDS)
        assert [span.name for span in collector.spans] == ["one"] * before + ["two"]


def test_threads_that_add_at_once_lose_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")  # the exporter takes groups that are not full

    def add() -> None:
        for _ in range(ADDED):
            pipeline.add(spans)

    with collecting() as collector:
        pipeline = Pipeline(collector.url)
        threads = [threading.Thread(target=add) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pipeline.close(PATIENCE_SECONDS)
        assert len(collector.spans) == 4 * ADDED


@pytest.mark.parametrize(
    ("given", "messages"), [("1", 4), (str(2 * GROUP), 2), (str(64 * GROUP), 1), ("many", 1)]
)
def test_a_message_has_the_spans_of_as_many_calls_as_the_variable_says(
    given: str, messages: int, slow: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", given)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    pipeline = Pipeline(slow.url)
    for _ in range(4 * GROUP):
        pipeline.add(spans)
    assert slow.held is not None
    slow.held.set()
    pipeline.close(PATIENCE_SECONDS)
    assert (slow.messages, len(slow.spans)) == (messages, 4 * GROUP)


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
