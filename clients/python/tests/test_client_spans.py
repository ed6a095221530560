"""Spans of calls in applications that trace, and nothing of it in others."""

import numpy as np
import pytest
from grpc_server import Service, running, unavailable
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from attention_client import AsyncAttentionClient, AttentionClient, UnavailableError

QUERY = np.ones((3, 4), np.float32)
ATTEND, STREAM = (f"attention.v1.AttentionService/{name}" for name in ("Attend", "AttendStream"))


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """The spans of an application whose provider is set for one test."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    return exporter


async def test_every_call_has_one_span_that_the_server_is_told_of(ended: InMemorySpanExporter) -> None:
    service = Service()
    with running(service) as target:
        with AttentionClient(target, metadata={"mine": "1"}) as client:
            client.attend("m", QUERY)
            assert len(list(client.attend_stream("m", [QUERY] * 3))) == 3
        async with AsyncAttentionClient(target) as client:
            await client.attend("m", QUERY)
            assert len([answer async for answer in client.attend_stream("m", [QUERY] * 2)]) == 2
    found = ended.get_finished_spans()
    assert [span.name for span in found] == [ATTEND, STREAM] * 2
    assert {(span.kind, span.status.status_code) for span in found} == {(SpanKind.CLIENT, StatusCode.UNSET)}
    assert (found[0].attributes or {})["server.port"] == int(target.rpartition(":")[2])
    contexts = [f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}" for span in found]
    assert [attempt["traceparent"].rpartition("-")[0] for attempt in service.attempts] == contexts
    assert service.attempts[0]["mine"] == "1"


def test_a_call_that_fails_has_an_error_and_without_a_provider_nothing_is_sent(
    ended: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(unavailable(1))
    with running(service) as target, AttentionClient(target, max_retries=0) as client:
        with pytest.raises(UnavailableError):
            client.attend("m", QUERY)
        monkeypatch.undo()
        client.attend("m", QUERY)
    (span,) = ended.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "UNAVAILABLE"
    assert ["traceparent" in attempt for attempt in service.attempts] == [True, False]
