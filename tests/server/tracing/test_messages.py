"""Serialized spans are those that the protobuf library makes."""

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from server.engine.timeline import Reference
from server.tracing.messages import (
    LOCAL,
    MAX_LINKS,
    REMOTE,
    SERVER,
    SpanPlace,
    span,
    trace_state,
    unique_attribute,
)

ids = st.integers(1, 2**64 - 1)
trace_ids = st.integers(1, 2**128 - 1)
moments = st.integers(0, 2**63)
references = st.lists(st.tuples(trace_ids, ids), max_size=3)


@given(
    trace_ids,
    ids,
    st.integers(0, 2**64 - 1),
    moments,
    moments,
    st.lists(st.tuples(trace_ids, ids), max_size=3),
)
def test_every_field_of_a_span_is_there(
    trace_id: int, span_id: int, parent_id: int, start: int, end: int, links: list[Reference]
) -> None:
    values = (("text", "a"), ("number", 3), ("share", 0.5), ("flag", True), ("none", ""))
    place = SpanPlace(trace_id, span_id, parent_id)
    data = span("n", place, start, end, kind=SERVER, flags=REMOTE, values=values, is_error=True, links=links)
    data += trace_state("a=b") + unique_attribute("id", "x")
    any_values = {
        "text": AnyValue(string_value="a"),
        "number": AnyValue(int_value=3),
        "share": AnyValue(double_value=0.5),
        "flag": AnyValue(bool_value=True),
        "id": AnyValue(string_value="x"),
    }
    assert Span.FromString(data) == Span(
        trace_id=trace_id.to_bytes(16),
        span_id=span_id.to_bytes(8),
        parent_span_id=parent_id.to_bytes(8) if parent_id else b"",
        trace_state="a=b",
        name="n",
        kind=Span.SPAN_KIND_SERVER,
        flags=REMOTE,
        start_time_unix_nano=start,
        end_time_unix_nano=max(start, end),
        attributes=[KeyValue(key=key, value=value) for key, value in any_values.items()],
        links=[
            Span.Link(trace_id=trace.to_bytes(16), span_id=own.to_bytes(8), flags=LOCAL)
            for trace, own in links
        ],
        status=Status(code=Status.STATUS_CODE_ERROR),
    )


def test_a_span_without_anything_that_is_optional() -> None:
    found = Span.FromString(span("n", SpanPlace(1, 2, 0), 5, 4))
    assert (found.kind, found.flags, found.end_time_unix_nano) == (Span.SPAN_KIND_INTERNAL, LOCAL, 5)
    names = [descriptor.name for descriptor, _ in found.ListFields()]
    assert names == [
        "trace_id",
        "span_id",
        "name",
        "kind",
        "start_time_unix_nano",
        "end_time_unix_nano",
        "flags",
    ]


def test_links_are_bounded() -> None:
    data = span("n", SpanPlace(1, 2, 0), 0, 0, links=[(1, own) for own in range(1, MAX_LINKS + 9)])
    assert len(Span.FromString(data).links) == MAX_LINKS
