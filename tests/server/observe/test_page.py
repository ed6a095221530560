"""docs/observability.md names every field, attribute and variable that there is."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from attention_serving.server.engine.statistics import RecordedRun
from attention_serving.server.observe import logs
from attention_serving.server.observe.logs import fields, http_fields
from attention_serving.server.observe.records import (
    CallRecord,
    HttpRecord,
    RequestRecord,
)
from attention_serving.server.observe.traces import Traces
from attention_serving.server.settings.sections import Observability
from tests.server.samples import ROOT

PAGE = (ROOT / "docs/observability.md").read_text()
NAMED = set(re.findall(r"`([^`\n]+)`", PAGE))


def ended(traces: Traces, *, is_stream: bool) -> tuple[CallRecord, RequestRecord]:
    """A call of which everything is known that can be."""
    call = CallRecord(
        "/s/m", "id", (), is_stream=is_stream, report=traces.ended, start_span=traces.start_request
    )
    call.span = traces.begin("/s/m", ())
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


def over_http(traces: Traces) -> HttpRecord:
    request = HttpRecord({"method": "GET", "path": "/v2", "scheme": "http"}, "/v2", "id", ())
    request.span, _ = traces.begin_http("GET /v2", ())
    request.status, request.ended_at = 500, request.arrived_at
    traces.http_ended(request)
    return request


def names() -> Iterator[str]:
    traces = Traces(host="h", port=9)
    for is_stream in (False, True):
        call, request = ended(traces, is_stream=is_stream)
        yield from fields(call, request)
        yield from fields(call, None)
        yield from keys(call.span)
        yield from keys(request.span)
    request_over_http = over_http(traces)
    yield from http_fields(request_over_http)
    yield from (key for key in keys(request_over_http.span) if key.startswith("attention."))
    traces.close(0)


def keys(span: Any) -> Iterator[str]:
    assert isinstance(span, ReadableSpan)
    yield from span.attributes or ()


@pytest.mark.parametrize("name", sorted(set(names())))
def test_a_name_is_on_the_page(name: str) -> None:
    assert name in NAMED


def test_every_option_is_on_the_page() -> None:
    for name in Observability.model_fields:
        assert f"--{name.replace('_', '-')}" in PAGE


@pytest.mark.parametrize("name", [logs.DISABLED, logs.EXPORTER, *logs.ENDPOINTS])
def test_every_variable_is_on_the_page(name: str) -> None:
    assert name in NAMED
