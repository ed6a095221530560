"""Extracts large fields from protobuf messages, and appends large fields to them, without copying.

The protobuf library makes an object of every element of a repeated field, and copies a `bytes` field when
it parses it, when it is read, when it is set and when the message is serialized. Here, tensors, numbers and
texts are extracted from a request's bytes before the rest is parsed, so that their sizes are known before
anything is built from them. Tensors are appended to a response's bytes after the rest was serialized. The
encoding permits both: fields may come in any order, and occurrences of one submessage are merged.
Source: protobuf.dev/programming-guides/encoding, "Message Structure" and "Last One Wins".
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from attention_serving.artifact.protobuf_fields import (
    FIXED32,
    FIXED64,
    LENGTH_DELIMITED,
    VARINT,
    message_fields,
)
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.types import Array

# Field names from the message down to a field that is extracted. The name of a repeated submessage is
# followed by the index of its occurrence.
Path: TypeAlias = "tuple[str | int, ...]"
# Start and end of each occurrence of a field, by its path.
ByteRanges: TypeAlias = "Mapping[Path, Sequence[tuple[int, int]]]"
Buffer: TypeAlias = "bytes | memoryview"
M = TypeVar("M", bound=Message)

# Wire types by field type; VARINT for the others.
WIRE_TYPES: dict[int, int] = {
    FieldDescriptor.TYPE_BYTES: LENGTH_DELIMITED,
    FieldDescriptor.TYPE_STRING: LENGTH_DELIMITED,
    FieldDescriptor.TYPE_MESSAGE: LENGTH_DELIMITED,
    FieldDescriptor.TYPE_FLOAT: FIXED32,
    FieldDescriptor.TYPE_FIXED32: FIXED32,
    FieldDescriptor.TYPE_DOUBLE: FIXED64,
}
ID = "id"
MALFORMED = "is not a request of this method:"
CACHED_HEADERS = 1024
# Longer than the longest id of a request with what is before it.
MAX_LEADING_BYTES = 2048


class ExtractedField(NamedTuple):
    """A field that is extracted, or a submessage from which fields are.

    Attributes:
        name: Its name.
        wire_types: Wire types of its occurrences. Repeated numbers are all in one occurrence or each in its
            own; the content of an occurrence reads the same.
        inner: What is extracted from the submessage; None if the field itself is extracted.
        repeated: Whether each occurrence is a submessage of its own; otherwise they are merged.
        replaces: What is extracted from the other members of its oneof, as paths from the message that has
            the oneof: only the member that comes last is set.
    """

    name: str
    wire_types: frozenset[int]
    inner: "ExtractedFields | None"
    repeated: bool
    replaces: "tuple[Path, ...]"


# What is extracted from a message, by field number. Its other fields are left.
ExtractedFields: TypeAlias = "Mapping[int, ExtractedField]"


def select_fields(message: Descriptor, paths: Sequence[str]) -> ExtractedFields:
    """Selects the fields of a message that are to be extracted.

    Args:
        message: The type of the message.
        paths: Names of fields from the message down, such as "query.data". They are `bytes`, strings or
            repeated numbers.
    """
    members: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        name, _, inner_path = path.partition(".")
        members[name] += [inner_path] if inner_path else []
    fields = {}
    for name, inner_paths in members.items():
        field = message.fields_by_name[name]
        inner = select_fields(field.message_type, inner_paths) if inner_paths else None
        kinds = frozenset({LENGTH_DELIMITED, WIRE_TYPES.get(field.type, VARINT)})
        oneof = field.containing_oneof
        siblings = [member.name for member in oneof.fields if member.name != name] if oneof else []
        replaces = tuple(tuple(path.split(".")) for path in paths if path.partition(".")[0] in siblings)
        fields[field.number] = ExtractedField(
            name, kinds, inner, inner is not None and field.is_repeated, replaces
        )
    return fields


class Parsed(Generic[M]):
    """A request whose tensors, numbers and texts were extracted.

    Attributes:
        message: The request, without what was extracted.
        data: What was received.
        byte_ranges: Start and end in `data` of the occurrences of each extracted field, and of the id.
        id: The field `id`: the caller's name for the request, or the context to continue; may be empty.
    """

    def __init__(self, message: M, data: bytes, byte_ranges: ByteRanges) -> None:
        self.message, self.data, self.byte_ranges = message, data, byte_ranges
        self.id = str(self.last(ID), "utf-8") if (ID,) in byte_ranges else ""

    def contents(self, *path: str | int) -> list[memoryview]:
        """The contents of a field, as views."""
        view = memoryview(self.data)
        return [view[start:end] for start, end in self.byte_ranges.get(path, ())]

    def last(self, *path: str | int) -> memoryview:
        """The content of a field that is not repeated: its last occurrence, or nothing."""
        start, end = self.byte_ranges.get(path, ((0, 0),))[-1]
        return memoryview(self.data)[start:end]

    def numbers(self, dtype: np.dtype[Any], *path: str | int, is_fixed: bool = False) -> "PackedNumbers":
        """The numbers of a repeated field; see `PackedNumbers`."""
        return PackedNumbers(self.contents(*path), dtype, is_fixed=is_fixed)


def make_parser(
    message_type: Any, paths: Iterable[str], max_sequences: int, request_field: str = ""
) -> Callable[[bytes], Parsed[Any]]:
    """A function that parses requests of one type.

    It raises DecodeError if they do not parse, and LimitExceededError if they have more fields, or more that
    is not extracted, than the longest encoding of a request with so many sequences: each may have a text or
    up to three lengths of its own, in a field each; names, shapes and parameters are few.

    Args:
        message_type: The type of the messages.
        paths: What is extracted from a request; see `select_fields`.
        max_sequences: Sequences of one request.
        request_field: The field of the message that is the request, to which the paths refer; empty if the
            message is the request.
    """
    bounds = 1024 + 8 * max_sequences, (64 << 10) + 32 * max_sequences
    ids = [ID] if ID in message_type.DESCRIPTOR.fields_by_name else []
    prefix = f"{request_field}." if request_field else ""
    root = select_fields(message_type.DESCRIPTOR, ids + [prefix + path for path in paths])

    def parse(data: bytes) -> Parsed[Any]:
        extractor = FieldExtractor(data, *bounds)
        try:
            message = message_type.FromString(extractor.extract(root, (), 0, len(data)))
            byte_ranges: ByteRanges = extractor.byte_ranges
            if request_field:
                message = getattr(message, request_field)
                byte_ranges = {
                    path[1:] if path[0] == request_field else path: ranges
                    for path, ranges in byte_ranges.items()
                }
            return Parsed(message, data, byte_ranges)
        except ValueError as error:
            raise DecodeError(str(error)) from error

    return parse


class FieldExtractor:
    """Extracts fields of one serialized message without copying them. Its work and memory are bounded.

    Attributes:
        byte_ranges: Where the occurrences of each field were found, in the message's order.
    """

    def __init__(self, message: bytes, max_fields: int, max_remainder: int) -> None:
        """Begins at the start of the message.

        Args:
            message: The message.
            max_fields: Number of fields that are looked at, those of submessages included.
            max_remainder: Size of everything that is not extracted: of what may be left to the protobuf
                library.
        """
        self.byte_ranges: dict[Path, list[tuple[int, int]]] = {}
        self._message = memoryview(message)
        self._max_fields, self._max_remainder = max_fields, max_remainder
        self._fields = self._remainder = 0
        self._occurrences: Counter[Path] = Counter()

    def extract(self, node: ExtractedFields, path: Path, begin: int, end: int) -> bytes:
        """Extracts fields of the message, or submessage, between two bytes; returns the bytes that are left.

        Raises:
            ValueError: The bytes are not a message.
            LimitExceededError: The message exceeds the bounds.
        """
        parts: list[Buffer] = []
        kept_from = begin
        for number, wire_type, start, content, stop in message_fields(self._message, begin, end):
            self._fields += 1
            if self._fields > self._max_fields:
                limit = f"has more than {self._max_fields} fields, which is the limit"
                raise LimitExceededError("message", limit)
            member = node.get(number)
            if member is None or wire_type not in member.wire_types:
                continue
            member_path: Path = (*path, member.name)
            for replaced in member.replaces:
                self.byte_ranges.pop((*path, *replaced), None)
            if start > kept_from:  # a view takes more memory than a short text
                parts.append(self._message[kept_from:start])
                self._remainder += start - kept_from
            kept_from = stop
            if member.inner is None:
                self.byte_ranges.setdefault(member_path, []).append((content, stop))
                continue
            if member.repeated:
                self._occurrences[member_path] += 1
                member_path = (*member_path, self._occurrences[member_path] - 1)
            inner = self.extract(member.inner, member_path, content, stop)
            parts += [field_header((number,), len(inner)), inner]
        self._remainder += end - kept_from
        if self._remainder > self._max_remainder:
            size = f"has at least {self._remainder} bytes besides tensors, numbers and texts"
            raise LimitExceededError("message", f"{size}; the limit is {self._max_remainder}")
        return b"".join([*parts, self._message[kept_from:end]])


def copy_fields(source: object, kind: type[M], **fields: object) -> M:
    """A message with the attributes of an object in the fields of the same names, and with other fields."""
    names = kind.DESCRIPTOR.fields_by_name.keys() - fields.keys()
    return kind(**fields, **{name: getattr(source, name) for name in names})


def leading_text(message: bytes, number: int) -> str:
    """The string that a message begins with, if its first field has that number; otherwise an empty string.

    Serializers write fields in the order of their numbers. At most `MAX_LEADING_BYTES` bytes are read.
    """
    try:
        first = next(message_fields(message, 0, min(len(message), MAX_LEADING_BYTES)), (0,) * 5)
    except ValueError:
        return ""
    is_text = first[:2] == (number, LENGTH_DELIMITED)
    return str(message[first[3] : first[4]], "utf-8", "replace") if is_text else ""


def encode_field(path: tuple[int, ...], content: Sequence[Buffer]) -> list[Buffer]:
    """Encodes a `bytes` field, to be appended to a serialized message, without copying its content.

    Args:
        path: The field's path; the submessages on the path merge with those of the message.
        content: The parts of the field's content.
    """
    size = sum([len(part) if isinstance(part, bytes) else part.nbytes for part in content])
    return [field_header(path, size), *content]


@lru_cache(maxsize=CACHED_HEADERS)
def field_header(path: tuple[int, ...], size: int) -> bytes:
    """The bytes before the content of a field: its key and size, and those of the submessages around it.

    Args:
        path: The field's path; the submessages on the path merge with those of the message.
        size: Size of the content.
    """
    heads = b""
    for number in reversed(path):
        heads = _encode_varint(number << 3 | LENGTH_DELIMITED) + _encode_varint(size + len(heads)) + heads
    return heads


def _encode_varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:  # noqa: PLR2004 - seven bits in a digit
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


# How much of a field is counted at a time, without a copy of all of it.
CHUNK_BYTES = 1 << 16
# The bytes of a varint that another byte follows have the high bit set.
CONTINUED = bytes(range(0x80, 256))
# A message that has one repeated field of varints for each type of numbers. Varints of any other field are
# decoded as that field, so that the protobuf library does it.
VarintFields = pb.InferTensorContents
FIELD_NUMBER_BY_DTYPE = {
    np.dtype("?"): VarintFields.BOOL_CONTENTS_FIELD_NUMBER,
    np.dtype("<i4"): VarintFields.INT_CONTENTS_FIELD_NUMBER,
    np.dtype("<i8"): VarintFields.INT64_CONTENTS_FIELD_NUMBER,
    np.dtype("<u4"): VarintFields.UINT_CONTENTS_FIELD_NUMBER,
    np.dtype("<u8"): VarintFields.UINT64_CONTENTS_FIELD_NUMBER,
}


class PackedNumbers:
    """A repeated numeric field as it was extracted from a message."""

    def __init__(
        self, occurrences: Sequence[memoryview], dtype: np.dtype[Any], *, is_fixed: bool = False
    ) -> None:
        """Takes a field that is not decoded yet.

        Args:
            occurrences: Contents of the field's occurrences, in the message's order.
            dtype: Type of the numbers. Floating-point numbers have a fixed width; others are varints.
            is_fixed: Whether integers have the width of their type, little-endian.
        """
        self._occurrences, self._dtype = occurrences, dtype
        self._is_fixed = is_fixed or dtype.kind == "f"

    def __len__(self) -> int:
        """Number of numbers. None of them is decoded."""
        if self._is_fixed:
            return sum(map(len, self._occurrences)) // self._dtype.itemsize
        return sum(
            len(bytes(content[at : at + CHUNK_BYTES]).translate(None, CONTINUED))
            for content in self._occurrences
            for at in range(0, len(content), CHUNK_BYTES)
        )

    def array(self) -> Array:
        """The numbers; a read-only view of the message if they have a fixed width and are in one place.

        Raises:
            InvalidRequestError: A number is incomplete or too long.
        """
        if self._is_fixed:
            if any(len(content) % self._dtype.itemsize for content in self._occurrences):
                raise InvalidRequestError("message", f"{MALFORMED} a field of numbers ends within a number")
            content = self._occurrences[0] if len(self._occurrences) == 1 else b"".join(self._occurrences)
            return np.frombuffer(content, self._dtype)
        number = FIELD_NUMBER_BY_DTYPE[self._dtype]
        parts = [part for content in self._occurrences for part in encode_field((number,), [content])]
        try:
            message = VarintFields.FromString(b"".join(parts))
        except DecodeError as error:
            problem = f"{MALFORMED} a field of numbers cannot be read: {error}"
            raise InvalidRequestError("message", problem) from error
        numbers = getattr(message, VarintFields.DESCRIPTOR.fields_by_number[number].name)
        return np.fromiter(numbers, self._dtype, len(numbers))
