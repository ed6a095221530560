"""Repeated numbers of protobuf messages as arrays, without an object for each number.

Source: protobuf.dev/programming-guides/encoding, "Base 128 Varints" and "Packed Repeated Fields".
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.types import Array

# How much of a field is decoded at a time: temporary arrays need up to 40 times as much.
CHUNK_BYTES = 1 << 18
MAX_DIGITS = 10
FEW_BYTES = 64
UINT32_MAX = 0xFFFF_FFFF
# The high bit of a digit says that another digit follows.
CONTINUES = np.uint8(0x80)


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
        chunks = (chunk for content in self._occurrences for chunk in _chunks(content))
        return sum(int(np.count_nonzero(chunk < CONTINUES)) for chunk in chunks)

    def array(self) -> Array:
        """The numbers; a read-only view of the message if it contains them all in one place.

        Raises:
            InvalidRequestError: A number is incomplete or too long.
        """
        if not self._is_fixed:
            return _decoded(self._occurrences, np.empty(len(self), self._dtype))
        if any(len(content) % self._dtype.itemsize for content in self._occurrences):
            raise _malformed("a field of numbers ends within a number")
        first, *others = self._occurrences
        return np.frombuffer(b"".join(self._occurrences) if others else first, self._dtype)


def few_lengths(occurrences: Sequence[memoryview]) -> list[int] | None:
    """The numbers of a repeated uint32 field of a few bytes; None if it has more.

    For a handful of numbers, Python is an order of magnitude faster than NumPy.

    Raises:
        InvalidRequestError: A number is incomplete or too long.
    """
    if sum([len(content) for content in occurrences]) > FEW_BYTES:
        return None
    numbers = []
    for content in occurrences:
        value = shift = 0
        for digit in content:
            value |= (digit & 0x7F) << shift
            shift += 7
            if digit < 0x80:  # noqa: PLR2004 - without the bit of CONTINUES
                numbers.append(value & UINT32_MAX)
                value = shift = 0
            elif shift == 7 * MAX_DIGITS:
                raise _malformed("a number has more than ten digits")
        if shift:
            raise _malformed("a number is incomplete")
    return numbers


def _decoded(occurrences: Iterable[memoryview], numbers: Array) -> Array:
    at = 0
    for content in occurrences:
        for values in _values(np.frombuffer(content, np.uint8)):
            numbers[at : at + len(values)] = _converted(values, numbers.dtype)
            at += len(values)
    return numbers


def _converted(values: NDArray[np.uint64], dtype: np.dtype[Any]) -> Array:
    if dtype.kind == "b":
        return np.not_equal(values, 0)
    lowest: Array = values.astype(f"<u{dtype.itemsize}")
    return lowest.view(dtype)


def _values(digits: NDArray[np.uint8]) -> Iterator[NDArray[np.uint64]]:
    """The numbers of one occurrence, some at a time."""
    while digits.size:
        chunk = digits[:CHUNK_BYTES]
        last = np.flatnonzero(chunk < CONTINUES)  # the last digit of each number
        if not last.size:
            raise _malformed("a number is incomplete")
        used = int(last[-1]) + 1
        yield _joined(chunk[:used], last)
        digits = digits[used:]


def _joined(digits: NDArray[np.uint8], last: NDArray[np.intp]) -> NDArray[np.uint64]:
    """Numbers of their digits, of which the lowest seven bits count, lowest digits first."""
    if digits.size == last.size:
        return digits.astype(np.uint64)
    first = np.empty_like(last)
    first[0], first[1:] = 0, last[:-1] + 1
    if (most := int((last - first).max()) + 1) > MAX_DIGITS:
        raise _malformed("a number has more than ten digits")
    numbers = (digits[first] & ~CONTINUES).astype(np.uint64)
    for index in range(1, most):
        (longer,) = np.nonzero(last - first >= index)
        digit = (digits[first[longer] + index] & ~CONTINUES).astype(np.uint64)
        numbers[longer] |= digit << np.uint64(7 * index)
    return numbers


def _chunks(content: memoryview) -> Iterator[NDArray[np.uint8]]:
    digits = np.frombuffer(content, np.uint8)
    return (digits[at : at + CHUNK_BYTES] for at in range(0, len(digits), CHUNK_BYTES))


def _malformed(says: str) -> InvalidRequestError:
    return InvalidRequestError("message", f"is not a request of this method: {says}")
