"""Reads and writes large `bytes` fields of protobuf messages without copying them.

The protobuf library copies a `bytes` field when it parses it, when it is read, when it is set and when the
message is serialized: four copies of a tensor. Here, tensors are cut out of a request's bytes before the
rest is parsed, and appended to a response's bytes after the rest was serialized. The encoding permits both:
fields may come in any order, and occurrences of one submessage are merged.
Source: protobuf.dev/programming-guides/encoding, "Message Structure" and "Last One Wins".
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

# Field numbers from the message down to a `bytes` field.
Path = tuple[int, ...]
# Which fields are cut out, by number: True for a `bytes` field, a tree for a submessage with such fields.
Tree: TypeAlias = "Mapping[int, Tree | bool]"
Blobs = list[tuple[Path, memoryview]]
Buffer: TypeAlias = "bytes | memoryview"
M = TypeVar("M", bound=Message)

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
FIXED_SIZES = {FIXED64: 8, FIXED32: 4}
# Messages smaller than this are faster to parse than to cut.
SMALL_BYTES = 8192
CACHED_HEADS = 1024


class Parsed(NamedTuple, Generic[M]):
    """A request: its message, and the fields that were cut out of it, if it is large."""

    message: M
    blobs: Blobs


def reader(parse: Callable[[bytes], M], tree: Tree) -> Callable[[bytes], Parsed[M]]:
    """Returns a function that parses requests of one type, and raises DecodeError if they do not parse."""

    def read(data: bytes) -> Parsed[M]:
        if len(data) < SMALL_BYTES:
            return Parsed(parse(data), [])
        rest, blobs = cut(data, tree)
        return Parsed(parse(rest), blobs)

    return read


def cut(message: bytes, tree: Tree) -> tuple[bytes, Blobs]:
    """Cuts fields out of a serialized message without copying them.

    Returns:
        The message without the fields, and views of the fields with their paths, in the message's order.

    Raises:
        DecodeError: The bytes are not a message, or use groups, which protobuf 3 lacks.
    """
    blobs: Blobs = []
    try:
        return b"".join(_rest(memoryview(message), tree, (), blobs)), blobs
    except IndexError:
        raise DecodeError("the message ends within a field") from None


def _rest(message: memoryview, tree: Tree, path: Path, blobs: Blobs) -> list[Buffer]:
    """The parts of a message that are left; appends what was cut out to `blobs`."""
    parts: list[Buffer] = []
    at = kept_from = 0
    while at < len(message):
        start = at
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        end, at = _extent(message, at, kind)
        inner = tree.get(number)
        if inner is None or kind != LENGTH_DELIMITED:
            at = end
            continue
        parts.append(message[kept_from:start])
        if inner is True:
            blobs.append(((*path, number), message[at:end]))
        elif isinstance(inner, Mapping):
            rest = b"".join(_rest(message[at:end], inner, (*path, number), blobs))
            parts += [_key(number), _encoded(len(rest)), rest]
        at = kept_from = end
    return [*parts, message[kept_from:]]


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


def field(path: Path, content: Sequence[Buffer]) -> list[Buffer]:
    """Encodes a `bytes` field, to be appended to a serialized message, without copying its content.

    Args:
        path: The field's path; the submessages on the path merge with those of the message.
        content: The parts of the field's content.
    """
    size = sum([len(part) if isinstance(part, bytes) else part.nbytes for part in content])
    return [_heads(path, size), *content]


@lru_cache(maxsize=CACHED_HEADS)
def _heads(path: Path, size: int) -> bytes:
    """The bytes before the content of a field: its key and size, and those of the submessages around it."""
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
