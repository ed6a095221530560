"""docs/observability.md names every field, attribute and variable that there is."""

import re
from collections.abc import Iterator

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans

from attention_serving.server.engine.statistics import RecordedRun
from attention_serving.server.http.observation import fields as http_fields
from attention_serving.server.http.record import HttpRecord
from attention_serving.server.records import CallRecord, RequestRecord, TraceContext
from attention_serving.server.request_log import fields
from attention_serving.server.settings.sections import Observability
from attention_serving.server.tracing import options
from attention_serving.server.tracing.http_spans import http_span
from attention_serving.server.tracing.spans import call_spans
from tests.server.samples import ROOT

PAGE = (ROOT / "docs/observability.md").read_text()
TRACE = TraceContext(b"t" * 16, b"s" * 8, sampled=True)
NAMED = set(re.findall(r"`([^`\n]+)`", PAGE))


def ended(*, is_stream: bool) -> tuple[CallRecord, RequestRecord]:
    """A call of which everything is known that can be."""
    call = CallRecord(
        "/s/m",
        "id",
        is_stream=is_stream,
        trace=TRACE,
        report=lambda _call, _request: None,
    )
    call.caller = "alice"
    request = call.received(1)
    request.model, request.version, request.sequences, request.rows = "m", "1", 1, 1
    request.queued_at = request.received_at
    run = RecordedRun(
        model="m",
        version="1",
        precision="fp32",
        graph="plain",
        sequences=1,
        rows=1,
        padding=1,
        started_at=request.queued_at,
        ended_at=request.queued_at,
    )
    request.runs = (run,)
    request.encoded(request.queued_at, 1)
    call.ended("INTERNAL", "REASON")
    return call, request


def over_http() -> HttpRecord:
    scope = {"method": "GET", "path": "/v2", "scheme": "http"}
    request = HttpRecord(scope, "/v2", "id", TRACE)
    request.status, request.ended_at = 500, request.arrived_at
    return request


def names() -> Iterator[str]:
    for is_stream in (False, True):
        call, request = ended(is_stream=is_stream)
        yield from fields(call, request)
        yield from fields(call, None)
        yield from keys(call_spans(call, request, (("server.port", 1),)))
    yield from http_fields(over_http())
    yield from (key for key in keys(http_span(over_http(), TRACE, ())) if key.startswith("attention."))


def keys(spans: bytes) -> Iterator[str]:
    for span in ScopeSpans.FromString(spans).spans:
        yield from (attribute.key for attribute in span.attributes)


@pytest.mark.parametrize("name", sorted(set(names())))
def test_a_name_is_on_the_page(name: str) -> None:
    assert name in NAMED


def test_every_option_is_on_the_page() -> None:
    for name in Observability.model_fields:
        assert f"--{name.replace('_', '-')}" in PAGE


def test_every_variable_is_on_the_page() -> None:
    texts = [value for value in vars(options).values() if isinstance(value, str)]
    values = [value for value in texts if value.startswith("OTEL_")]
    assert len(values) == 5
    for name in (*values, *options.ENDPOINTS):
        assert name in NAMED
