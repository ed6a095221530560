"""W3C Trace Context in and out, and the decision whether a call is sampled.

Source: https://www.w3.org/TR/trace-context/. What is malformed is ignored, as that recommendation demands.
"""

import random
import re
from collections.abc import Iterable

from attention_serving.server.records import TraceContext, new_span_id
from attention_serving.server.tracing.options import TraceOptions

PARENT, STATE = "traceparent", "tracestate"
# Version, trace id, span id and flags. Later versions may append fields.
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
FIRST_VERSION, FORBIDDEN_VERSION = "00", "ff"
SAMPLED = 0x01
MAX_STATE = 512
ID_BYTES, ID_BITS = 8, 64

Metadata = Iterable[tuple[str, str | bytes]]


class Head:
    """Decides once for each call whether it is sampled. For any thread."""

    def __init__(self, options: TraceOptions) -> None:
        """Creates the head of the traces of a process.

        Args:
            options: The ratio, and whether the caller's decision is followed.
        """
        self._follows_parent = options.follows_parent
        # Of the lower half of a trace id, as OpenTelemetry's TraceIdRatioBased: services agree on a trace.
        self._bound = round(options.ratio * (1 << ID_BITS))

    def begin(self, metadata: Metadata) -> TraceContext | None:
        """The place of a new call in a trace; None if it has no trace.

        A call whose caller sent a context has one although it may not be sampled, so that the log can name
        its trace.

        Args:
            metadata: The metadata of the call, or the headers of a request, with lower-case names.
        """
        parent = _parent(metadata)
        if parent is not None:
            return self._child(parent)
        low = random.getrandbits(ID_BITS)
        return _root(low, sampled=True) if low < self._bound else None

    def begin_always(self, metadata: Metadata) -> TraceContext:
        """As `begin`; a call that is not sampled has a context too, which can be passed on."""
        parent = _parent(metadata)
        low = random.getrandbits(ID_BITS)
        return self._child(parent) if parent is not None else _root(low, sampled=low < self._bound)

    def _child(self, parent: TraceContext) -> TraceContext:
        sampled = parent.sampled
        if not self._follows_parent:
            sampled = int.from_bytes(parent.trace_id[-ID_BYTES:]) < self._bound
        return TraceContext(
            parent.trace_id, new_span_id(), sampled=sampled, parent_id=parent.span_id, state=parent.state
        )


def _root(low: int, *, sampled: bool) -> TraceContext:
    """The beginning of a trace, given the lower half of its id."""
    # The upper half, like that of a span, is not zero.
    return TraceContext(new_span_id() + low.to_bytes(ID_BYTES), new_span_id(), sampled=sampled)


def _parent(metadata: Metadata) -> TraceContext | None:
    """The caller's context; None if it sent none, or what cannot be taken."""
    parent = state = None
    for key, value in metadata:
        if key == PARENT:
            if parent is not None:  # two contradict each other
                return None
            parent = value
        elif key == STATE:
            state = value
    return parse(parent, state) if isinstance(parent, str) else None


def parse(parent: str, state: str | bytes | None) -> TraceContext | None:
    """The caller's context; None if `traceparent` is malformed.

    Args:
        parent: The value of `traceparent`.
        state: The value of `tracestate`; one that is too long, or not text, is left out.
    """
    found = _PARENT.fullmatch(parent)
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == FORBIDDEN_VERSION or (version == FIRST_VERSION and rest):
        return None
    trace, span = bytes.fromhex(trace_id), bytes.fromhex(span_id)
    if not any(trace) or not any(span):
        return None
    kept = state if isinstance(state, str) and _is_plain(state) else ""
    return TraceContext(trace, span, sampled=bool(int(flags, 16) & SAMPLED), state=kept)


def _is_plain(text: str) -> bool:
    return len(text) <= MAX_STATE and text.isascii() and text.isprintable()


def headers(context: TraceContext) -> list[tuple[str, str]]:
    """What passes a context on: `traceparent`, and `tracestate` if there is one."""
    flags = SAMPLED if context.sampled else 0
    parent = f"{FIRST_VERSION}-{context.trace_id.hex()}-{context.span_id.hex()}-{flags:02x}"
    return [(PARENT, parent), *([(STATE, context.state)] if context.state else [])]
