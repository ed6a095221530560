"""Cuts large fields out of protobuf messages, and appends large fields to them, without copying.

The protobuf library makes an object of every element of a repeated field, and copies a `bytes` field when
it parses it, when it is read, when it is set and when the message is serialized. Here, tensors, numbers and
texts are cut out of a request's bytes before the rest is parsed, so that their sizes are known before
anything is built from them. Tensors are appended to a response's bytes after the rest was serialized. The
encoding permits both: fields may come in any order, and occurrences of one submessage are merged.
Source: protobuf.dev/programming-guides/encoding, "Message Structure" and "Last One Wins".
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from attention_serving.server.engine.errors import LimitExceededError

# Field numbers from the message down to a field. The number of a repeated submessage is followed by the index
# of its occurrence.
Path = tuple[int, ...]
# The occurrences of each field that was cut out, in the message's order.
Fields: TypeAlias = "Mapping[Path, Sequence[memoryview]]"
Buffer: TypeAlias = "bytes | memoryview"
M = TypeVar("M", bound=Message)

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
FIXED_SIZES = {FIXED64: 8, FIXED32: 4}
# Messages smaller than this are faster to parse than to cut.
SMALL_BYTES = 32 << 10
CACHED_HEADS = 1024
MAX_LEADING_BYTES = 1024
NOTHING_CUT: Fields = {}


@dataclass(frozen=True)
class Leaf:
    """A field that is cut out, given by the wire types that its occurrences may have."""

    wire_types: frozenset[int]


@dataclass(frozen=True)
class Submessage:
    """A message from which fields are cut out. Its other fields are left.

    Attributes:
        fields: What is cut out, by field number.
        repeated: Whether each occurrence is a submessage of its own; otherwise they are merged.
        oneof: Numbers of fields of which the last one replaces the others.
    """

    fields: "Mapping[int, Submessage | Leaf]"
    repeated: bool = False
    oneof: frozenset[int] = frozenset()
    wire_types = frozenset({LENGTH_DELIMITED})


# A `bytes` or `string` field, repeated or not.
CONTENT = Leaf(frozenset({LENGTH_DELIMITED}))
# Repeated numbers, all in one occurrence or each in its own: the content of an occurrence reads the same.
VARINTS = Leaf(frozenset({LENGTH_DELIMITED, VARINT}))
# Of 4 and 8 bytes each, floating-point or not.
FLOATS = Leaf(frozenset({LENGTH_DELIMITED, FIXED32}))
DOUBLES = Leaf(frozenset({LENGTH_DELIMITED, FIXED64}))


class Bounds(NamedTuple):
    """How much of a large message is looked at, and how much of it may be left to the protobuf library.

    Attributes:
        fields: Number of fields, those of submessages included.
        rest_bytes: Size of everything that is not cut out.
    """

    fields: int
    rest_bytes: int

    @classmethod
    def for_sequences(cls, max_sequences: int) -> "Bounds":
        """Bounds that fit the longest encoding of a request with so many sequences.

        A sequence may have a text or up to three lengths of its own, in a field each; names, shapes and
        parameters are few.
        """
        return cls(fields=1024 + 8 * max_sequences, rest_bytes=(64 << 10) + 32 * max_sequences)


class Parsed(NamedTuple, Generic[M]):
    """A request.

    Attributes:
        message: Its message.
        fields: The fields that were cut out of the message, if it is large.
        data: The message as it was received.
    """

    message: M
    fields: Fields = NOTHING_CUT
    data: bytes = b""


def reader(parse: Callable[[bytes], M], root: Submessage, bounds: Bounds) -> Callable[[bytes], Parsed[M]]:
    """Returns a function that parses requests of one type.

    It raises DecodeError if they do not parse, and LimitExceededError if they exceed the bounds.
    """

    def read(data: bytes) -> Parsed[M]:
        if len(data) < SMALL_BYTES:
            return Parsed(parse(data), NOTHING_CUT, data)
        rest, fields = cut(data, root, bounds)
        return Parsed(parse(rest), fields, data)

    return read


def cut(message: bytes, root: Submessage, bounds: Bounds) -> tuple[bytes, Fields]:
    """Cuts fields out of a serialized message without copying them.

    Returns:
        The message without the fields, and views of the fields.

    Raises:
        DecodeError: The bytes are not a message, or use groups, which protobuf 3 lacks.
        LimitExceededError: The message exceeds the bounds.
    """
    cutter = _Cutter(bounds)
    try:
        return b"".join(cutter.rest(memoryview(message), root, ())), cutter.fields
    except IndexError:
        raise DecodeError("the message ends within a field") from None


def places(message: bytes, root: Submessage, bounds: Bounds) -> list[tuple[Path, tuple[int, int]]]:
    """Where the contents of fields begin and end in a serialized message that parses, in its order.

    Raises:
        DecodeError: The message uses groups, which protobuf 3 lacks.
        LimitExceededError: The message exceeds the bounds.
    """
    found: list[tuple[Path, tuple[int, int]]] = []
    _Cutter(bounds, found).rest(memoryview(message), root, ())
    return found


class _Cutter:
    """Walks one message. Work and memory are bounded, whatever the message contains."""

    def __init__(self, bounds: Bounds, places: "list[tuple[Path, tuple[int, int]]] | None" = None) -> None:
        self.fields: dict[Path, list[memoryview]] = {}
        self._places = places
        self._bounds = bounds
        self._fields_left = bounds.fields
        self._rest_left = bounds.rest_bytes
        self._occurrences: Counter[Path] = Counter()

    def rest(self, message: memoryview, node: Submessage, path: Path, offset: int = 0) -> list[Buffer]:
        """The parts of a message that are left; adds what is cut out to the fields and places.

        `offset` is where the message begins in that which contains it.
        """
        parts: list[Buffer] = []
        at = kept_from = 0
        while at < len(message):
            self._count_field()
            start = at
            key, at = _varint(message, at)
            number, kind = key >> 3, key & 7
            end, at = _extent(message, at, kind)
            inner = node.fields.get(number)
            if inner is None or kind not in inner.wire_types:
                at = end
                continue
            if kept_from < start:
                parts.append(self._kept(message[kept_from:start]))
            if number in node.oneof:
                self._replace_others(node.oneof, path, number)
            if isinstance(inner, Leaf):
                self.fields.setdefault((*path, number), []).append(message[at:end])
                if self._places is not None:
                    self._places.append(((*path, number), (offset + at, offset + end)))
            else:
                inner_path = self._inner_path(path, number, inner)
                rest = b"".join(self.rest(message[at:end], inner, inner_path, offset + at))
                parts += [_key(number), _encoded(len(rest)), rest]
            at = kept_from = end
        return [*parts, self._kept(message[kept_from:])]

    def _count_field(self) -> None:
        self._fields_left -= 1
        if self._fields_left < 0:
            raise LimitExceededError(
                "message", f"has more than {self._bounds.fields} fields, which is the limit"
            )

    def _kept(self, part: memoryview) -> memoryview:
        self._rest_left -= len(part)
        if self._rest_left < 0:
            raise LimitExceededError(
                "message",
                f"has at least {self._bounds.rest_bytes - self._rest_left} bytes besides tensors, numbers and"
                f" texts; the limit is {self._bounds.rest_bytes}",
            )
        return part

    def _replace_others(self, oneof: frozenset[int], path: Path, number: int) -> None:
        at = len(path)
        replaced = [own for own in self.fields if own[:at] == path and own[at] in oneof and own[at] != number]
        for own in replaced:
            del self.fields[own]

    def _inner_path(self, path: Path, number: int, node: Submessage) -> Path:
        path = (*path, number)
        if not node.repeated:
            return path
        self._occurrences[path] += 1
        return (*path, self._occurrences[path] - 1)


def _extent(message: memoryview, at: int, kind: int) -> tuple[int, int]:
    """The offsets at which the value of a field ends, and at which its content begins."""
    if kind == LENGTH_DELIMITED:
        size, at = _varint(message, at)
        end = at + size
    elif kind == VARINT:
        _, end = _varint(message, at)
    elif kind in FIXED_SIZES:
        end = at + FIXED_SIZES[kind]
    else:
        raise DecodeError(f"wire type {kind} is unknown")
    if end > len(message):
        raise DecodeError("a field extends beyond the end of the message")
    return end, at


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Decodes a number in base 128, lowest digits first; returns it and the offset at which it ends."""
    value = shift = 0
    while shift <= 63:  # noqa: PLR2004 - ten digits of seven bits
        digit = message[at]
        at += 1
        value |= (digit & 0x7F) << shift
        if digit < 0x80:  # noqa: PLR2004 - the last digit has its high bit clear
            return value, at
        shift += 7
    raise DecodeError("a number has more than ten digits")


def leading_text(message: bytes, number: int) -> str:
    """The string that a message begins with, if its first field has that number; otherwise an empty string.

    Serializers write fields in the order of their numbers. At most `MAX_LEADING_BYTES` bytes are read.
    """
    start = memoryview(message)[:MAX_LEADING_BYTES]
    try:
        key, at = _varint(start, 0)
        end, at = _extent(start, at, key & 7)
    except (IndexError, DecodeError):
        return ""
    return str(start[at:end], "utf-8", "replace") if key == number << 3 | LENGTH_DELIMITED else ""


def field(path: Path, content: Sequence[Buffer]) -> list[Buffer]:
    """Encodes a `bytes` field, to be appended to a serialized message, without copying its content.

    Args:
        path: The field's path; the submessages on the path merge with those of the message.
        content: The parts of the field's content.
    """
    size = sum([len(part) if isinstance(part, bytes) else part.nbytes for part in content])
    return [head(path, size), *content]


@lru_cache(maxsize=CACHED_HEADS)
def head(path: Path, size: int) -> bytes:
    """The bytes before the content of a field: its key and size, and those of the submessages around it.

    Args:
        path: The field's path; the submessages on the path merge with those of the message.
        size: Size of the content.
    """
    heads = b""
    for number in reversed(path):
        heads = _key(number) + _encoded(size + len(heads)) + heads
    return heads


def _key(number: int) -> bytes:
    return _encoded(number << 3 | LENGTH_DELIMITED)


def _encoded(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:  # noqa: PLR2004 - seven bits in a digit
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)
