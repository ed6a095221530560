"""Serialized spans are those that the protobuf library makes."""

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span, Status

from attention_serving.server.engine.statistics import Reference
from attention_serving.server.tracing.messages import (
    LOCAL,
    MAX_LINKS,
    REMOTE,
    SERVER,
    SpanTemplate,
    linked,
    trace_state,
    unique_attribute,
)

trace_ids, ids = st.binary(min_size=16, max_size=16), st.binary(min_size=8, max_size=8)
moments = st.integers(0, 2**63)
TRACE, OWN, PARENT = b"t" * 16, b"o" * 8, b"p" * 8


def read(data: bytes) -> Span:
    (span,) = ScopeSpans.FromString(data).spans
    return span


@given(
    trace_ids,
    ids,
    st.just(b"") | ids,
    moments,
    moments,
    st.lists(st.tuples(trace_ids, ids), max_size=3),
    st.text(),
)
def test_every_field_of_a_span_is_there(
    trace_id: bytes, span_id: bytes, parent_id: bytes, start: int, end: int, links: list[Reference], text: str
) -> None:
    values = (("text", "a"), ("number", 3), ("share", 0.5), ("flag", True), ("none", ""))
    template = SpanTemplate("n", kind=SERVER, flags=REMOTE, values=values, is_error=True)
    more = linked(links) + trace_state("a=b") + unique_attribute("id", text)
    any_values = {
        "text": AnyValue(string_value="a"),
        "number": AnyValue(int_value=3),
        "share": AnyValue(double_value=0.5),
        "flag": AnyValue(bool_value=True),
        "id": AnyValue(string_value=text),
    }
    assert read(template.filled(trace_id, span_id, parent_id, start, end, more)) == Span(
        trace_id=trace_id,
        span_id=span_id,
        parent_span_id=parent_id,
        trace_state="a=b",
        name="n",
        kind=Span.SPAN_KIND_SERVER,
        flags=REMOTE,
        start_time_unix_nano=start,
        end_time_unix_nano=max(start, end),
        attributes=[KeyValue(key=key, value=value) for key, value in any_values.items()],
        links=[Span.Link(trace_id=trace, span_id=own, flags=LOCAL) for trace, own in links],
        status=Status(code=Status.STATUS_CODE_ERROR),
    )


def test_a_span_without_anything_that_is_optional() -> None:
    found = read(SpanTemplate("n").filled(TRACE, OWN, b"", 5, 4))
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


@given(st.lists(st.tuples(st.text(), st.integers(0, 200)), max_size=8))
def test_spans_one_after_the_other_are_one_message(spans: list[tuple[str, int]]) -> None:
    data = b""
    for name, links in spans:
        data += SpanTemplate(name).filled(TRACE, OWN, PARENT, 1, 2, linked([(TRACE, OWN)] * links))
    found = ScopeSpans.FromString(data).spans
    assert [(span.name, len(span.links)) for span in found] == [
        (name, min(links, MAX_LINKS)) for name, links in spans
    ]
    assert all(span.parent_span_id == PARENT for span in found)
