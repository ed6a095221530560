"""The fields of a serialized protobuf message, found without the protobuf library and without copies.

Source: protobuf.dev/programming-guides/encoding, "Message Structure".
"""

import mmap
from collections.abc import Iterator

# Wire types. proto3 has no groups, but takes them as unknown fields.
VARINT, FIXED64, LENGTH_DELIMITED, GROUP, GROUP_END, FIXED32 = range(6)
FIXED_SIZES = {FIXED64: 8, FIXED32: 4}
MAX_VARINT_BITS = 64
# The protobuf library's limit of nesting.
MAX_DEPTH = 100


def message_fields(
    data: mmap.mmap | bytes | memoryview, begin: int, end: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """The fields of the message between two bytes, in its order.

    Yields:
        Number, wire type, offset of the field, offset of its content, and exclusive end offset of both. The
        number is 0 for the beginning and the end of a group, and for the fields in it.

    Raises:
        ValueError: The bytes are not a message.
    """
    at, groups = begin, list[int]()
    while at < end or groups:
        start = at
        key, at = _varint(data, at, end)
        number, wire_type = key >> 3, key & 7
        if not number:
            raise ValueError(f"field number 0 at byte {start}")
        content = at
        if wire_type == VARINT:
            _, at = _varint(data, at, end)
        elif wire_type == LENGTH_DELIMITED:
            length, content = _varint(data, at, end)
            at = content + length
        elif wire_type in FIXED_SIZES:
            at += FIXED_SIZES[wire_type]
        elif wire_type == GROUP and len(groups) < MAX_DEPTH:
            groups.append(number)
        elif wire_type == GROUP_END and groups[-1:] == [number]:
            number = 0
            groups.pop()
        else:
            raise ValueError(f"wire type {wire_type} at byte {start}")
        if at > end:
            raise ValueError(f"field {number} is cut off at byte {end}")
        yield 0 if groups else number, wire_type, start, content, at


def _varint(data: mmap.mmap | bytes | memoryview, at: int, end: int) -> tuple[int, int]:
    """Decodes a number in base 128, lowest digits first; returns it and its exclusive end offset."""
    value = 0
    for shift in range(0, MAX_VARINT_BITS, 7):
        if at >= end:
            raise ValueError(f"cut off at byte {end}")
        digit = data[at]
        at += 1
        value |= (digit & 0x7F) << shift
        if digit < 0x80:  # noqa: PLR2004 - the highest bit says that more follows
            return value, at
    raise ValueError(f"a number longer than {MAX_VARINT_BITS} bits at byte {at}")
