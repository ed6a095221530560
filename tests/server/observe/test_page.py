"""docs/observability.md names every field, attribute and variable that there is."""

import re
from collections.abc import Iterator
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan

from attention_serving.server.engine.statistics import RecordedRun
from attention_serving.server.observe import logs
from attention_serving.server.observe.logs import fields, http_fields
from attention_serving.server.observe.records import CallRecord, HttpRecord
from attention_serving.server.observe.traces import Traces
from attention_serving.server.settings.sections import Observability
from tests.server.samples import ROOT

PAGE = (ROOT / "docs/observability.md").read_text()
SIZES: dict[str, Any] = {"model": "m", "version": "1", "sequences": 1, "rows": 1}


def of_call(traces: Traces, *, is_stream: bool) -> Iterator[str]:
    """The names of a call of which everything is known that can be."""
    call = CallRecord(
        "/s/m", "id", (), is_stream=is_stream, report=traces.ended, start_span=traces.start_request
    )
    call.span, call.caller = traces.begin("/s/m", ()), "alice"
    request = call.received(1)
    vars(request).update(SIZES, queued_at=request.received_at)
    at = request.received_at
    run = RecordedRun(**SIZES, precision="fp32", graph="plain", padding=1, started_at=at, ended_at=at)
    request.runs = (run,)
    request.encoded(at, 1)
    call.ended("INTERNAL", "REASON")
    yield from [*fields(call, request), *fields(call, None), *keys(call.span), *keys(request.span)]


def of_http(traces: Traces) -> Iterator[str]:
    request = HttpRecord({"method": "GET", "path": "/v2", "scheme": "http"}, "/v2", "id", ())
    request.span, _ = traces.begin_http("GET /v2", ())
    request.status, request.ended_at = 500, request.arrived_at
    traces.http_ended(request)
    yield from http_fields(request)
    yield from (key for key in keys(request.span) if key.startswith("attention."))


def keys(span: Any) -> Iterator[str]:
    assert isinstance(span, ReadableSpan)
    yield from span.attributes or ()


def test_every_name_is_on_the_page() -> None:
    traces = Traces(host="h", port=9)
    names = {*of_call(traces, is_stream=False), *of_call(traces, is_stream=True), *of_http(traces)}
    traces.close(0)
    names |= {logs.DISABLED, logs.EXPORTER, *logs.ENDPOINTS}
    assert len(names) > 30
    assert names - set(re.findall(r"`([^`\n]+)`", PAGE)) == set()
    assert [name for name in Observability.model_fields if f"--{name.replace('_', '-')}" not in PAGE] == []
