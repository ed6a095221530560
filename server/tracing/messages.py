"""The parts of OTLP messages that all spans share. For the exporter's thread."""

import struct
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, TypeAlias

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from server.engine.timeline import Reference

Value = str | int | float | bool
# Names and values. A name has values of one type only.
Attributes: TypeAlias = tuple[tuple[str, Value], ...]
INTERNAL, SERVER = Span.SPAN_KIND_INTERNAL, Span.SPAN_KIND_SERVER
ERROR = Status(code=Status.STATUS_CODE_ERROR)
# The W3C flag "sampled", and whether the parent is of another process.
LOCAL, REMOTE = 0x101, 0x301
CACHED_ATTRIBUTES = 4096
NANOSECONDS = 1_000_000_000
# The fields of a span that no other span shares: key and size of the identifiers, keys of the moments.
_TRACE_ID, _SPAN_ID, _PARENT_ID, _START, _END = b"\x0a\x10", b"\x12\x08", b"\x22\x08", b"\x39", b"\x41"
_HEAD = struct.Struct("<2s16s2s8ssQsQ")
# The specification's limit of links of a span.
MAX_LINKS = 128


class SpanPlace(NamedTuple):
    """The identifiers of a span.

    Attributes:
        trace_id: 128 bits.
        span_id: 64 bits.
        parent_id: 64 bits; 0 if the trace begins with the span.
    """

    trace_id: int
    span_id: int
    parent_id: int


class Clock:
    """Converts moments of `time.monotonic` to nanoseconds since 1970."""

    def __init__(self, moment: float, nanoseconds: int) -> None:
        """Both arguments are the same moment, on the two clocks."""
        self._moment, self._nanoseconds = moment, nanoseconds

    def __call__(self, moment: float) -> int:
        """Nanoseconds since 1970 of a moment."""
        return self._nanoseconds + int((moment - self._moment) * NANOSECONDS)


@lru_cache(CACHED_ATTRIBUTES, typed=True)  # 1, 1.0 and True are equal
def attribute(key: str, value: Value) -> KeyValue:
    """One attribute."""
    return KeyValue(key=key, value=_value(value))


def _value(value: Value) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case _:
            return AnyValue(string_value=value)


def attributes(values: Attributes) -> list[KeyValue]:
    """Attributes; those that are empty texts are left out."""
    return [attribute(key, value) for key, value in values if value != ""]


def plain_attributes(values: Mapping[str, object]) -> Iterator[KeyValue]:
    """Attributes of any type that a resource may have."""
    for key, value in values.items():
        if isinstance(value, Value):
            yield attribute(key, value)
        elif isinstance(value, list | tuple):
            parts = [_value(part) for part in value]
            yield KeyValue(key=key, value=AnyValue(array_value=ArrayValue(values=parts)))


def span(
    name: str,
    place: SpanPlace,
    start: int,
    end: int,
    *,
    kind: Span.SpanKind.ValueType = INTERNAL,
    flags: int = LOCAL,
    values: Attributes = (),
    is_error: bool = False,
    links: Iterable[Reference] = (),
) -> bytes:
    """A serialized span. It costs a sixth of a `Span` that is made and serialized.

    Args:
        name: Its name.
        place: Its identifiers.
        start: Nanoseconds since 1970.
        end: The same; a moment before the start counts as the start.
        kind: Whether it is the span of a server, or of something within it.
        flags: Whether its parent is of another process.
        values: Attributes that many spans share; those that are empty texts are left out.
        is_error: Whether it failed.
        links: Spans that it is linked to.
    """
    head = _HEAD.pack(
        _TRACE_ID,
        place.trace_id.to_bytes(16),
        _SPAN_ID,
        place.span_id.to_bytes(8),
        _START,
        start,
        _END,
        max(start, end),
    )
    parent = _PARENT_ID + place.parent_id.to_bytes(8) if place.parent_id else b""
    found = linked(links)
    more = Span(links=found).SerializeToString() if found else b""
    # Serialized messages that follow each other are one message with the fields of all.
    return b"".join([head, parent, _shared(name, kind, flags, values, is_error), more])


@lru_cache(CACHED_ATTRIBUTES)
def _shared(
    name: str,
    kind: Span.SpanKind.ValueType,
    flags: int,
    values: Attributes,
    is_error: bool,  # noqa: FBT001 - cached by position
) -> bytes:
    """The fields of a span that others have as well."""
    return Span(
        name=name,
        kind=kind,
        flags=flags,
        attributes=attributes(values),
        status=ERROR if is_error else None,
    ).SerializeToString()


def trace_state(state: str) -> bytes:
    """The caller's `tracestate`, to be appended to a serialized span."""
    return Span(trace_state=state).SerializeToString() if state else b""


def unique_attribute(key: str, value: str) -> bytes:
    """One attribute that no other span has, to be appended to a serialized span."""
    found = Span()
    found.attributes.add(key=key).value.string_value = value
    return found.SerializeToString()


def linked(references: Iterable[Reference]) -> list[Span.Link]:
    """Links to spans, at most `MAX_LINKS`."""
    return [
        Span.Link(trace_id=trace_id.to_bytes(16), span_id=span_id.to_bytes(8), flags=LOCAL)
        for trace_id, span_id in islice(references, MAX_LINKS)
    ]
