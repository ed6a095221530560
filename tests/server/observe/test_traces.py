"""What switches traces on, which calls are sampled, how contexts arrive and leave, the end of an exporter."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.context import Context
from opentelemetry.trace import Span, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from attention_serving.server.observe.logs import Recorder, are_traces_on
from attention_serving.server.observe.records import PARENT, STATE, callers_trace
from attention_serving.server.observe.traces import Traces
from tests.support.collector import PATIENCE_SECONDS, QUICKLY, collecting

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
NOBODY = "http://127.0.0.1:1"
CALLS = 2000
MALFORMED = ["", "garbage", GOOD.upper(), GOOD[:-1], f" {GOOD}", f"{GOOD}\n", "00-" + "a" * 10_000]
PIECES = ("00", "01", "cc", "ff", TRACE, "0" * 32, SPAN, "0" * 16, "0g", "more", "")


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUICKLY.items():
        monkeypatch.setenv(name, value)


@contextmanager
def sampling(
    monkeypatch: pytest.MonkeyPatch, ratio: float, sampler: str = "parentbased_traceidratio"
) -> Iterator[Traces]:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", str(ratio))
    monkeypatch.setenv(ENDPOINT, NOBODY)
    traces = Traces()
    yield traces
    traces.close(0)


def begun(traces: Traces, *metadata: tuple[str, str | bytes]) -> Span | None:
    """The span of a new call, as the recorder asks for it."""
    return traces.begin("/a/B", metadata)


def test_bad_contexts_are_dropped(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with sampling(monkeypatch, 1) as traces:
        for value in MALFORMED:
            span = begun(traces, (PARENT, value), (STATE, "vendor=1"))
            assert span is not None
            context = span.get_span_context()
            assert (len(context.trace_state), f"{context.trace_id:032x}" == TRACE) == (0, False)
        for state in ("x" * 513, "a=\u00e9", "a=\x00", "x code=OK caller=admin"):
            span = begun(traces, (PARENT, GOOD), (STATE, state))
            assert span is not None
            assert len(span.get_span_context().trace_state) == 0
    assert not [record for record in caplog.records if "Member" in record.msg]


@given(st.lists(st.sampled_from(PIECES), min_size=4, max_size=5).map("-".join))
def test_the_contexts_that_are_taken_are_those_that_opentelemetry_takes(value: str) -> None:
    theirs = get_current_span(TraceContextTextMapPropagator().extract({PARENT: value}, Context()))
    context, found = theirs.get_span_context(), callers_trace([(PARENT, value)])
    assert context.is_valid is (found is not None)
    assert found in (None, (f"{context.trace_id:032x}", context.trace_flags.sampled))
    for contradicting_or_binary in ([value, value], [value.encode()]):
        assert callers_trace([(PARENT, each) for each in contradicting_or_binary]) is None


@pytest.mark.parametrize(
    ("sampler", "ratio", "flag", "sampled"),
    [
        ("parentbased_traceidratio", 0, "1", True),
        ("parentbased_traceidratio", 1, "0", False),
        ("traceidratio", 0, "1", False),
        ("traceidratio", 1, "0", True),
    ],
)
def test_the_decision_of_the_caller_is_followed_if_the_sampler_follows_callers(
    sampler: str, ratio: float, flag: str, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sampling(monkeypatch, ratio, sampler) as traces:
        found = begun(traces, (PARENT, f"{GOOD[:-1]}{flag}"), (STATE, "vendor=1"))
    assert (found is not None) is sampled
    if found is not None:
        context = found.get_span_context()
        assert (f"{context.trace_id:032x}", context.trace_state["vendor"]) == (TRACE, "1")


def test_a_ratio_samples_about_that_share_of_new_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    with sampling(monkeypatch, 0.1) as traces:
        sampled = [span for span in (begun(traces) for _ in range(CALLS)) if span is not None]
    with sampling(monkeypatch, 1) as every:
        assert None not in [begun(every) for _ in range(50)]
    # Outside with a probability of 1 in 10 ** 9: the standard deviation is 13.4.
    assert abs(len(sampled) - CALLS / 10) < 6.2 * 13.4
    assert len({span.get_span_context().trace_id for span in sampled}) == len(sampled)


def add(traces: Traces) -> None:
    span = begun(traces)
    assert span is not None
    span.end()


def test_a_collector_delays_nobody(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(ENDPOINT, NOBODY)
    absent = Traces()
    add(absent)
    absent.close(0.1)
    with collecting() as slow:
        slow.held = threading.Event()
        monkeypatch.setenv(ENDPOINT, slow.url)
        traces = Traces()
        add(traces)
        assert slow.exporting.wait(PATIENCE_SECONDS)
        for _ in range(10_000):  # more than the queue holds
            add(traces)
        traces.close(0.1)
    assert "traces lost" in caplog.text


def test_what_is_queued_is_sent_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    with collecting() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        traces = Traces()
        add(traces)
        traces.close(PATIENCE_SECONDS)
        (span,) = collector.spans
    assert span.name == "a/B"
    assert span.resource["service.name"] == "mine"
    assert span.resource["deployment.environment.name"] == "test"


URL = "http://127.0.0.1:4317"
ON = {"OTEL_EXPORTER_OTLP_ENDPOINT": URL}


@pytest.mark.parametrize(
    ("environment", "are_on"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "attention", "OTEL_TRACES_SAMPLER": "always_on"}, False),
        ({**ON, "OTEL_SDK_DISABLED": " True "}, False),
        ({**ON, "OTEL_TRACES_EXPORTER": "none, otlp"}, False),
        ({**ON, "OTEL_TRACES_EXPORTER": "zipkin"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        (ON, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": URL}, True),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, True),
        ({**ON, "OTEL_SDK_DISABLED": "false"}, True),
    ],
)
def test_variables_switch_traces_on_and_off(environment: dict[str, str], are_on: bool) -> None:
    assert are_traces_on(environment) is are_on


def test_a_fault_of_the_traces_breaks_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError

    recorder = Recorder("none")
    monkeypatch.setattr(recorder, "_traces", SimpleNamespace(begin=fail))
    call = SimpleNamespace(method="/a/B", metadata=())
    is_stream = True
    assert recorder(call, is_stream) is None  # type: ignore[arg-type]
