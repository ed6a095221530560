"""Bytes on the wire to arrays and back, without copying where NumPy allows it."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from server.engine.errors import InvalidRequestError
from server.engine.types import Array
from server.rpc.protobuf_bytes import Buffer


def from_bytes(
    field: str, data: bytes | memoryview, dtype: np.dtype[np.generic], shape: Sequence[int]
) -> Array:
    """A read-only view of little-endian bytes as an array of that type and shape.

    Raises:
        InvalidRequestError: There are more or fewer bytes than the shape needs, or no array has that shape.
    """
    expected = dtype.itemsize * math.prod(shape)
    if len(data) != expected:
        shown = " x ".join(map(str, shape))
        raise InvalidRequestError(
            field, f"holds {len(data)} bytes; {shown} elements of {dtype.name} are {expected} bytes"
        )
    return reshaped(field, np.frombuffer(data, dtype), shape)


def reshaped(field: str, array: Array, shape: Sequence[int]) -> Array:
    """An array in another shape of as many elements.

    Raises:
        InvalidRequestError: A size is negative, or there are more axes or elements than an array can have.
    """
    if shape and min(shape) < 0:
        raise InvalidRequestError(field, f"shape {list(shape)} has a negative size")
    try:
        return array.reshape(shape)
    except ValueError as error:
        raise InvalidRequestError(field, f"shape {list(shape)}: {error}") from error


def buffers(arrays: Iterable[Array]) -> list[Buffer]:
    """The memory of arrays, row-major; those whose elements lie in this order are not copied."""
    return [np.ascontiguousarray(array).data for array in arrays]
