"""The parts of OTLP messages that all spans share. For the exporter's thread."""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from server.engine.timeline import Reference
from server.rpc.records import new_span_id

Value = str | int | float | bool
INTERNAL, SERVER = Span.SPAN_KIND_INTERNAL, Span.SPAN_KIND_SERVER
ERROR = Status(code=Status.STATUS_CODE_ERROR)
# The W3C flag "sampled", and whether the parent is of another process.
LOCAL, REMOTE = 0x101, 0x301
CACHED_ATTRIBUTES = 4096
NANOSECONDS = 1_000_000_000
# The specification's limit of links of a span.
MAX_LINKS = 128


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


def attributes(values: Mapping[str, Any]) -> list[KeyValue]:
    """Attributes; those that are empty texts are left out."""
    return [attribute(key, value) for key, value in values.items() if value != ""]


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
    parent: Reference,
    start: int,
    end: int,
    *,
    span_id: int = 0,
    values: Iterable[KeyValue] = (),
    links: Iterable[Reference] = (),
) -> Span:
    """A span within the server.

    Args:
        name: Its name.
        parent: Trace and span that it belongs to.
        start: Nanoseconds since 1970.
        end: The same; a moment before the start counts as the start.
        span_id: Its identifier; 0 makes one.
        values: Attributes.
        links: Spans that it is linked to.
    """
    trace_id, parent_id = parent
    return Span(
        trace_id=trace_id.to_bytes(16),
        span_id=(span_id or new_span_id()).to_bytes(8),
        parent_span_id=parent_id.to_bytes(8),
        flags=LOCAL,
        name=name,
        kind=INTERNAL,
        start_time_unix_nano=start,
        end_time_unix_nano=max(start, end),
        attributes=values,
        links=linked(links),
    )


def linked(references: Iterable[Reference]) -> list[Span.Link]:
    """Links to spans, at most `MAX_LINKS`."""
    return [
        Span.Link(trace_id=trace_id.to_bytes(16), span_id=span_id.to_bytes(8), flags=LOCAL)
        for trace_id, span_id in islice(references, MAX_LINKS)
    ]
