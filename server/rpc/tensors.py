"""Converts between bytes and arrays, without copying if NumPy allows it."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from server.engine.errors import InvalidRequestError
from server.engine.types import Array
from server.rpc.protobuf_bytes import Buffer


def from_bytes(
    field: str,
    data: bytes | memoryview,
    dtype: np.dtype[np.generic],
    shape: Sequence[int],
    type_name: str = "",
) -> Array:
    """Returns a read-only view of little-endian bytes as an array.

    Args:
        field: Name of the field, for errors.
        data: The bytes.
        dtype: Type of the elements.
        shape: Shape of the array.
        type_name: Name of the type, for errors, if NumPy has another.

    Raises:
        InvalidRequestError: The number of bytes does not fit the shape, or an array cannot have that shape.
    """
    expected = dtype.itemsize * math.prod(shape)
    if len(data) != expected:
        shown = " x ".join(map(str, shape))
        raise InvalidRequestError(
            field,
            f"has {len(data)} bytes; {shown} elements of {type_name or dtype.name} need {expected} bytes",
        )
    return reshaped(field, np.frombuffer(data, dtype), shape)


def reshaped(field: str, array: Array, shape: Sequence[int]) -> Array:
    """Returns an array in another shape with the same number of elements.

    Raises:
        InvalidRequestError: A size is negative, or NumPy does not support the shape.
    """
    if shape and min(shape) < 0:
        raise InvalidRequestError(field, f"shape {list(shape)} has a negative size; sizes must be 0 or more")
    try:
        return array.reshape(shape)
    except ValueError as error:
        raise InvalidRequestError(field, f"shape {list(shape)}: {error}") from error


def buffers(arrays: Iterable[Array]) -> list[Buffer]:
    """Returns the memory of arrays in row-major order. Arrays in that order are not copied."""
    return [np.ascontiguousarray(array).data for array in arrays]
