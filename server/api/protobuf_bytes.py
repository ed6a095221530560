"""Cuts large fields out of protobuf messages, and appends large fields to them, without copying.

The protobuf library makes an object of every element of a repeated field, and copies a `bytes` field when
it parses it, when it is read, when it is set and when the message is serialized. Here, tensors, numbers and
texts are cut out of a request's bytes before the rest is parsed, so that their sizes are known before
anything is built from them. Tensors are appended to a response's bytes after the rest was serialized. The
encoding permits both: fields may come in any order, and occurrences of one submessage are merged.
Source: protobuf.dev/programming-guides/encoding, "Message Structure" and "Last One Wins".
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.types import Array

# Field names from the message down to a field that is cut out. The name of a repeated submessage is followed
# by the index of its occurrence.
Path: TypeAlias = "tuple[str | int, ...]"
# The occurrences of each field that was cut out, in the message's order.
Fields: TypeAlias = "Mapping[Path, Sequence[memoryview]]"
# Start and end of a field's content in its message.
Place = tuple[int, int]
Buffer: TypeAlias = "bytes | memoryview"
M = TypeVar("M", bound=Message)

VARINT, FIXED64, LENGTH_DELIMITED, START_GROUP, END_GROUP, FIXED32 = range(6)
FIXED_SIZES = {FIXED64: 8, FIXED32: 4}
# Wire types by field type; VARINT for the others.
WIRE_TYPES: dict[int, int] = {
    FieldDescriptor.TYPE_BYTES: LENGTH_DELIMITED,
    FieldDescriptor.TYPE_STRING: LENGTH_DELIMITED,
    FieldDescriptor.TYPE_MESSAGE: LENGTH_DELIMITED,
    FieldDescriptor.TYPE_FLOAT: FIXED32,
    FieldDescriptor.TYPE_FIXED32: FIXED32,
    FieldDescriptor.TYPE_DOUBLE: FIXED64,
}
CACHED_HEADS = 1024
MAX_LEADING_BYTES = 1024


class CutField(NamedTuple):
    """A field that is cut out, or a submessage from which fields are.

    Attributes:
        name: Its name.
        wire_types: Wire types of its occurrences. Repeated numbers are all in one occurrence or each in its
            own; the content of an occurrence reads the same.
        inner: What is cut out of the submessage; None if the field itself is cut out.
        repeated: Whether each occurrence is a submessage of its own; otherwise they are merged.
        replaced: Paths of the fields in other members of its oneof, which an occurrence replaces.
    """

    name: str
    wire_types: frozenset[int]
    inner: "Submessage | None"
    repeated: bool
    replaced: Sequence[Path]


@dataclass(frozen=True)
class Submessage:
    """A message from which fields are cut out. Its other fields are left.

    Attributes:
        fields: What is cut out, by field number.
    """

    fields: Mapping[int, CutField]

    @classmethod
    def of(cls, message: Descriptor, paths: Iterable[str]) -> "Submessage":
        """Selects fields of a message.

        Args:
            message: The type of the message.
            paths: Names of fields from the message down, such as "query.data". They are `bytes`, strings or
                repeated numbers; members of a oneof have no repeated submessages.
        """
        members: dict[str, list[str]] = defaultdict(list)
        for path in paths:
            name, _, rest = path.partition(".")
            members[name] += [rest] if rest else []
        fields = {}
        for name, own in members.items():
            field = message.fields_by_name[name]
            inner = cls.of(field.message_type, own) if own else None
            oneof = field.containing_oneof
            others = [] if oneof is None else [other.name for other in oneof.fields if other.name != name]
            replaced = [(other, *path.split(".")) for other in others for path in members.get(other, ())]
            kinds = frozenset({LENGTH_DELIMITED, WIRE_TYPES.get(field.type, VARINT)})
            repeated = inner is not None and field.is_repeated
            fields[field.number] = CutField(name, kinds, inner, repeated, replaced)
        return cls(fields)


class Bounds(NamedTuple):
    """How much of a message is looked at, and how much of it may be left to the protobuf library.

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
        message: Its message, without the fields that were cut out.
        fields: The fields that were cut out.
        data: The message as it was received.
    """

    message: M
    fields: Fields
    data: bytes


def reader(parse: Callable[[bytes], M], root: Submessage, bounds: Bounds) -> Callable[[bytes], Parsed[M]]:
    """Returns a function that parses requests of one type.

    It raises DecodeError if they do not parse, and LimitExceededError if they exceed the bounds.
    """

    def read(data: bytes) -> Parsed[M]:
        rest, fields = cut(data, root, bounds)
        return Parsed(parse(rest), fields, data)

    return read


def cut(message: bytes, root: Submessage, bounds: Bounds) -> tuple[bytes, Fields]:
    """Cuts fields out of a serialized message without copying them.

    Returns:
        The message without the fields, and views of the fields.

    Raises:
        DecodeError: The bytes are not a message.
        LimitExceededError: The message exceeds the bounds.
    """
    cutter, view = _Cutter(bounds), memoryview(message)
    rest = b"".join(cutter.rest(view, root, ()))
    return rest, {path: [view[start:end] for start, end in own] for path, own in cutter.places.items()}


def last(fields: Fields, path: Path) -> bytes | memoryview:
    """The content of a `bytes` field that is not repeated: its last occurrence, or nothing."""
    return fields[path][-1] if path in fields else b""


def places(message: bytes, root: Submessage, bounds: Bounds) -> list[tuple[Path, Place]]:
    """Where the contents of fields begin and end in a serialized message, in its order.

    Raises:
        DecodeError: The bytes are not a message.
        LimitExceededError: The message exceeds the bounds.
    """
    cutter = _Cutter(bounds)
    cutter.rest(memoryview(message), root, ())
    found = [(path, place) for path, own in cutter.places.items() for place in own]
    return sorted(found, key=lambda each: each[1])


class _Cutter:
    """Walks one message. Work and memory are bounded, whatever the message contains.

    Attributes:
        places: Where the occurrences of each field were found, in the message's order.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.places: dict[Path, list[Place]] = {}
        self._bounds = bounds
        self._fields_left = bounds.fields
        self._rest_left = bounds.rest_bytes
        self._occurrences: Counter[Path] = Counter()

    def rest(self, message: memoryview, node: Submessage, path: Path, offset: int = 0) -> list[Buffer]:
        """The parts of a message that are left; adds what is cut out to the places.

        `offset` is where the message begins in that which contains it.
        """
        parts: list[Buffer] = []
        at = kept_from = depth = 0
        while at < len(message):
            self._count_field()
            start = at
            key, at = _varint(message, at)
            number, kind = key >> 3, key & 7
            end, at = _extent(message, at, kind)
            # Unknown fields may be groups, whose fields are not those of the message.
            depth += (kind == START_GROUP) - (kind == END_GROUP)
            own = None if depth else node.fields.get(number)
            if own is None or kind not in own.wire_types:
                at = end
                continue
            if kept_from < start:
                parts.append(self._kept(message[kept_from:start]))
            for other in own.replaced:
                self.places.pop((*path, *other), None)
            own_path: Path = (*path, own.name)
            if own.inner is None:
                self.places.setdefault(own_path, []).append((offset + at, offset + end))
            else:
                if own.repeated:
                    self._occurrences[own_path] += 1
                    own_path = (*own_path, self._occurrences[own_path] - 1)
                rest = b"".join(self.rest(message[at:end], own.inner, own_path, offset + at))
                parts += [_key(number), _encoded(len(rest)), rest]
            at = kept_from = end
        if depth:
            raise DecodeError("a group has no end")
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


def _extent(message: memoryview, at: int, kind: int) -> tuple[int, int]:
    """The offsets at which the value of a field ends, and at which its content begins."""
    if kind == LENGTH_DELIMITED:
        size, at = _varint(message, at)
        end = at + size
    elif kind == VARINT:
        _, end = _varint(message, at)
    elif kind in FIXED_SIZES:
        end = at + FIXED_SIZES[kind]
    elif kind in (START_GROUP, END_GROUP):
        end = at
    else:
        raise DecodeError(f"wire type {kind} is unknown")
    if end > len(message):
        raise DecodeError("a field extends beyond the end of the message")
    return end, at


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Decodes a number in base 128, lowest digits first; returns it and the offset at which it ends."""
    value = shift = 0
    while shift <= 63:  # noqa: PLR2004 - ten digits of seven bits
        if at == len(message):
            raise DecodeError("the message ends within a number")
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
    except DecodeError:
        return ""
    return str(start[at:end], "utf-8", "replace") if key == number << 3 | LENGTH_DELIMITED else ""


def field(path: tuple[int, ...], content: Sequence[Buffer]) -> list[Buffer]:
    """Encodes a `bytes` field, to be appended to a serialized message, without copying its content.

    Args:
        path: The field's path; the submessages on the path merge with those of the message.
        content: The parts of the field's content.
    """
    size = sum([len(part) if isinstance(part, bytes) else part.nbytes for part in content])
    return [head(path, size), *content]


@lru_cache(maxsize=CACHED_HEADS)
def head(path: tuple[int, ...], size: int) -> bytes:
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


# How much of a field is decoded at a time: temporary arrays need up to 40 times as much.
CHUNK_BYTES = 1 << 16
MAX_DIGITS = 10
# The high bit of a digit says that another digit follows.
CONTINUES = 0x80
CONTINUED = bytes(range(CONTINUES, 256))


class PackedNumbers:
    """A repeated numeric field as it was cut out of a message."""

    def __init__(
        self, occurrences: Sequence[memoryview], dtype: np.dtype[Any], *, is_fixed: bool = False
    ) -> None:
        """Takes a field that is not decoded yet.

        Args:
            occurrences: Contents of the field's occurrences, in the message's order.
            dtype: Type of the numbers. Floating-point numbers have a fixed width; others are varints, of
                which each type takes the lowest bits, as the protobuf library does.
            is_fixed: Whether integers have the width of their type, little-endian.
        """
        self._occurrences = occurrences
        self._dtype = dtype
        self._is_fixed = is_fixed or dtype.kind == "f"

    def __len__(self) -> int:
        """Number of numbers. None of them is decoded."""
        if self._is_fixed:
            return sum(map(len, self._occurrences)) // self._dtype.itemsize
        chunks = (bytes(chunk) for content in self._occurrences for chunk in _chunks(content))
        return sum(len(chunk.translate(None, CONTINUED)) for chunk in chunks)

    def array(self) -> Array:
        """The numbers; a read-only view of the message if they have a fixed width and are in one place.

        Raises:
            InvalidRequestError: A number is incomplete or too long.
        """
        is_whole = self._is_whole_fixed if self._is_fixed else _is_whole
        if not all(map(is_whole, self._occurrences)):
            raise _malformed("a field of numbers ends within a number")
        content = self._occurrences[0] if len(self._occurrences) == 1 else b"".join(self._occurrences)
        if self._is_fixed:
            return np.frombuffer(content, self._dtype)
        digits, count = np.frombuffer(content, np.uint8), len(self)
        if digits.size == count:
            return digits.astype(self._dtype)
        numbers, at = np.empty(count, self._dtype), 0
        for values in _values(digits):
            numbers[at : at + len(values)] = _converted(values, self._dtype)
            at += len(values)
        return numbers

    def _is_whole_fixed(self, content: memoryview) -> bool:
        return len(content) % self._dtype.itemsize == 0


def _is_whole(content: memoryview) -> bool:
    return not content or content[-1] < CONTINUES


def _chunks(content: memoryview) -> Iterator[memoryview]:
    return (content[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES))


def _converted(values: NDArray[np.uint64], dtype: np.dtype[Any]) -> Array:
    if dtype.kind == "b":
        return np.not_equal(values, 0)
    lowest: Array = values.astype(f"<u{dtype.itemsize}")
    return lowest.view(dtype)


def _values(digits: NDArray[np.uint8]) -> Iterator[NDArray[np.uint64]]:
    """The numbers of a field that ends with a number, some at a time."""
    while digits.size:
        (last,) = np.nonzero(digits[:CHUNK_BYTES] < CONTINUES)  # the last digit of each number
        counts = np.diff(last, prepend=-1)
        if not last.size or counts.max() > MAX_DIGITS:
            raise _malformed("a number has more than ten digits")
        used = int(last[-1]) + 1
        yield _joined(digits[:used], last - counts + 1, counts)
        digits = digits[used:]


def _joined(
    digits: NDArray[np.uint8], first: NDArray[np.intp], counts: NDArray[np.intp]
) -> NDArray[np.uint64]:
    """Numbers of their digits, of which the lowest seven bits count, lowest digits first."""
    places = np.arange(digits.size) - np.repeat(first, counts)
    shifted = (digits & ~np.uint8(CONTINUES)).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.bitwise_or.reduceat(shifted, first)


def _malformed(says: str) -> InvalidRequestError:
    return InvalidRequestError("message", f"is not a request of this method: {says}")
