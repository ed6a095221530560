"""Repeated numbers of protobuf messages as arrays, without an object for each number.

Source: protobuf.dev/programming-guides/encoding, "Base 128 Varints" and "Packed Repeated Fields".
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.types import Array

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
