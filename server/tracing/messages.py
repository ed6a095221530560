"""The parts of OTLP messages that all spans share."""

import struct
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import TypeAlias

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span, Status

from attention_serving.server.api.protobuf_bytes import head
from attention_serving.server.engine.statistics import Reference

Value = str | int | float | bool
# Names and values. A name has values of one type only.
Attributes: TypeAlias = tuple[tuple[str, Value], ...]
INTERNAL, SERVER = Span.SPAN_KIND_INTERNAL, Span.SPAN_KIND_SERVER
ERROR = Status(code=Status.STATUS_CODE_ERROR)
# The W3C flag "sampled", and whether the parent is of another process.
LOCAL, REMOTE = 0x101, 0x301
CACHED = 4096
NANOSECONDS = 1_000_000_000
# The fields of a span that no other span shares: key and size of the identifiers, keys of the moments.
_TRACE_ID, _SPAN_ID, _PARENT_ID, _START, _END = b"\x0a\x10", b"\x12\x08", b"\x22\x08", b"\x39", b"\x41"
# A link: key and size, and the key of its flags; its identifiers have the keys of a span's.
_LINKS, _FLAGS = b"\x6a\x21", b"\x35"
_LINK = struct.Struct("<2s2s16s2s8ssI")
_ROOT, _CHILD = struct.Struct("<2s16s2s8ssQsQ"), struct.Struct("<2s16s2s8ssQsQ2s8s")
SPANS, ATTRIBUTES = (ScopeSpans.SPANS_FIELD_NUMBER,), (Span.ATTRIBUTES_FIELD_NUMBER,)
TEXT_VALUE = (KeyValue.VALUE_FIELD_NUMBER, AnyValue.STRING_VALUE_FIELD_NUMBER)
# The specification's limit of links of a span.
MAX_LINKS = 128


@lru_cache(CACHED, typed=True)  # 1, 1.0 and True are equal
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


def nanoseconds(moment: float) -> int:
    """A moment in seconds, in nanoseconds."""
    return int(moment * NANOSECONDS)


class SpanTemplate:
    """What spans of a kind have in common, serialized once, and filled for each of them.

    A span is returned as a field of a serialized `ScopeSpans`, so that spans one after the other are one. It
    costs a tenth of a `Span` that is made and serialized.
    """

    __slots__ = ("_before_child", "_before_root", "_common")

    def __init__(
        self,
        name: str,
        *,
        kind: Span.SpanKind.ValueType = INTERNAL,
        flags: int = LOCAL,
        values: Attributes = (),
        is_error: bool = False,
    ) -> None:
        """Serializes what is common.

        Args:
            name: Name of the spans.
            kind: Whether they are spans of a server, or of something within it.
            flags: Whether their parents are of another process.
            values: Their attributes; those that are empty texts are left out.
            is_error: Whether they failed.
        """
        self._common = Span(
            name=name,
            kind=kind,
            flags=flags,
            attributes=attributes(values),
            status=ERROR if is_error else None,
        ).SerializeToString()
        self._before_root = head(SPANS, len(self._common) + _ROOT.size) + self._common
        self._before_child = head(SPANS, len(self._common) + _CHILD.size) + self._common

    def filled(
        self, trace_id: bytes, span_id: bytes, parent_id: bytes, start: int, end: int, more: bytes = b""
    ) -> bytes:
        """A span.

        Args:
            trace_id: 16 bytes.
            span_id: 8 bytes.
            parent_id: 8 bytes; empty if the trace begins with the span.
            start: Nanoseconds since 1970.
            end: The same; a moment before the start counts as the start.
            more: Further serialized fields of the span.
        """
        end = max(start, end)
        if parent_id:
            own = _CHILD.pack(
                _TRACE_ID, trace_id, _SPAN_ID, span_id, _START, start, _END, end, _PARENT_ID, parent_id
            )
            before = self._before_child
        else:
            own = _ROOT.pack(_TRACE_ID, trace_id, _SPAN_ID, span_id, _START, start, _END, end)
            before = self._before_root
        if more:
            # Serialized messages that follow each other are one message with the fields of all.
            return b"".join([head(SPANS, len(self._common) + len(own) + len(more)), self._common, own, more])
        return before + own


def trace_state(state: str) -> bytes:
    """The caller's `tracestate` as a field of a span."""
    return Span(trace_state=state).SerializeToString()


def unique_attribute(key: str, value: str) -> bytes:
    """One attribute that no other span has, as a field of a span."""
    text = value.encode()
    content = b"".join([_key(key), head(TEXT_VALUE, len(text)), text])
    return head(ATTRIBUTES, len(content)) + content


@lru_cache
def _key(key: str) -> bytes:
    return KeyValue(key=key).SerializeToString()


def linked(references: Iterable[Reference]) -> bytes:
    """Links to spans, at most `MAX_LINKS`, as fields of a span."""
    return b"".join(
        [
            _LINK.pack(_LINKS, _TRACE_ID, trace_id, _SPAN_ID, span_id, _FLAGS, LOCAL)
            for trace_id, span_id in islice(references, MAX_LINKS)
        ]
    )
