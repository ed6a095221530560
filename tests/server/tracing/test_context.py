"""W3C Trace Context in and out, and the decision to sample."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from attention_serving.server.records import TraceContext
from attention_serving.server.tracing.context import PARENT, STATE, Head, headers, parse
from attention_serving.server.tracing.options import TraceOptions

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"
CALLS = 2000


def begun(
    *metadata: tuple[str, str | bytes], ratio: float = 0.0, follows: bool = True
) -> TraceContext | None:
    return Head(TraceOptions(ratio=ratio, follows_parent=follows)).begin(metadata)


def test_a_call_continues_the_trace_of_its_caller() -> None:
    found = begun(("user-agent", "x"), (PARENT, GOOD), (STATE, "vendor=1"))
    assert found is not None
    assert (found.trace_id, found.parent_id) == (bytes.fromhex(TRACE), bytes.fromhex(SPAN))
    assert found.sampled
    assert found.state == "vendor=1"
    assert found.span_id not in (bytes(8), found.parent_id)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "garbage",
        GOOD.upper(),
        GOOD[:-1],
        f"{GOOD}-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-0g",
        f"00_{TRACE}_{SPAN}_01",
        f" {GOOD}",
        f"{GOOD}\n",
        "00-" + "a" * 10_000,
    ],
)
def test_a_malformed_context_is_ignored(value: str) -> None:
    assert parse(value, None) is None
    assert begun((PARENT, value)) is None
    rooted = begun((PARENT, value), (STATE, "vendor=1"), ratio=1)
    assert rooted is not None
    assert (rooted.parent_id, rooted.state) == (b"", "")
    assert rooted.trace_id != bytes.fromhex(TRACE)


def test_two_contexts_contradict_each_other() -> None:
    assert begun((PARENT, GOOD), (PARENT, GOOD)) is None


def test_a_binary_context_is_ignored() -> None:
    assert begun((PARENT, GOOD.encode())) is None


def test_a_later_version_may_have_more_fields() -> None:
    found = parse(f"cc-{TRACE}-{SPAN}-01-what-comes-later", None)
    assert found is not None
    assert found.sampled


@pytest.mark.parametrize(
    "state", ["x" * 513, "a=\u00e9", "a=\x00", b"a=1"], ids=["long", "accent", "nul", "bytes"]
)
def test_a_malformed_state_is_left_out(state: str | bytes) -> None:
    found = parse(GOOD, state)
    assert found is not None
    assert found.state == ""


@given(
    trace=st.binary(min_size=16, max_size=16).filter(any),
    span=st.binary(min_size=8, max_size=8).filter(any),
    sampled=st.booleans(),
)
def test_a_context_arrives_as_opentelemetry_reads_and_writes_it(
    trace: bytes, span: bytes, sampled: bool
) -> None:
    sent = dict(headers(TraceContext(trace, span, sampled=sampled, state="a=1")))
    theirs = TraceContextTextMapPropagator().extract(sent)
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, theirs)
    assert carrier == sent
    found = parse(carrier[PARENT], carrier[STATE])
    assert found is not None
    assert (found.trace_id, found.span_id, found.sampled, found.state) == (trace, span, sampled, "a=1")


@pytest.mark.parametrize("sampled", [True, False])
def test_the_decision_of_the_caller_is_followed(sampled: bool) -> None:
    value = GOOD if sampled else f"{GOOD[:-1]}0"
    found = begun((PARENT, value), ratio=0.0 if sampled else 1.0)
    assert found is not None
    assert found.sampled is sampled


@given(low=st.integers(0, 2**64 - 1), ratio=st.floats(0, 1))
def test_without_the_parent_the_ratio_decides_as_in_opentelemetry(low: int, ratio: float) -> None:
    trace = 1 << 64 | low
    value = f"00-{trace:032x}-{SPAN}-00"
    found = begun((PARENT, value), ratio=ratio, follows=False)
    assert found is not None
    context = SpanContext(trace, int(SPAN, 16), is_remote=True, trace_flags=TraceFlags(0))
    theirs = TraceIdRatioBased(ratio).should_sample(
        set_span_in_context(NonRecordingSpan(context)), trace, "span"
    )
    assert found.sampled is (theirs.decision is Decision.RECORD_AND_SAMPLE)


def test_a_ratio_samples_about_that_share_of_new_traces() -> None:
    head = Head(TraceOptions(ratio=0.1))
    sampled = [found for found in (head.begin(()) for _ in range(CALLS)) if found is not None]
    # Outside with a probability of 1 in 10 ** 9: the standard deviation is 13.4.
    assert abs(len(sampled) - CALLS / 10) < 6.2 * 13.4
    assert all(found.sampled and not found.parent_id for found in sampled)
    assert len({found.trace_id for found in sampled}) == len(sampled)


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (1.0, CALLS)])
def test_the_ends_of_the_ratio_are_exact(ratio: float, count: int) -> None:
    head = Head(TraceOptions(ratio=ratio))
    assert sum(head.begin(()) is not None for _ in range(CALLS)) == count


def test_a_request_that_is_not_sampled_is_not_sampled_by_the_next_service_either() -> None:
    first = Head(TraceOptions(ratio=0.5))
    second = Head(TraceOptions(ratio=0.5, follows_parent=False))
    for _ in range(CALLS):
        passed_on = first.begin_always(())
        found = second.begin(headers(passed_on))
        assert found is not None
        assert found.sampled is passed_on.sampled
